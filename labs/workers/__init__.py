"""How code gets onto ranks: launch, devices, output, failures, and the detection of hangs.

In the caller: `launcher` (the one call) takes a plan from `devices` and the packed function from
`pickling`; `rank_group` starts the ranks through `processes`, listens to each through a
`rank_handle`, and stops them. `hang_rules` decides when they can no longer succeed;
`collective_matching` compares what they call; `outcomes` says how each ended, and `failures`
raises it as one message. `output` shows what ranks print and report.

In the fork server: `forkserver_preload` imports torch once, `forkserver_cleanup` tidies up.

On a rank: `worker` is its main function, `channel` its connection to the caller, `heartbeat` the
thread that reports where it is, from what `waits` notes and `activity` measures; `users_groups` is
for functions that set up groups themselves, `memory` the rank's limit, `slow_link` what lets its
collectives take time on a CPU, `pickling` how its result is sent back.

`hosts` is another way onto ranks: several hosts on this machine, for torchrun and other programs.
"""
