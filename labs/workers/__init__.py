"""How code gets onto ranks: launch, devices, output, faults, and the watch for hangs.

In the caller: launcher (the one call) asks devices for a plan, payload packs the function, crew
starts and hears its members, judge says when they cannot succeed any more, and failures makes one
message of what became of them. screen and progress show what they print and report; calls holds
their collectives against each other; start keeps the fork server, and janitor tidies up after it.

On a rank: worker is its whole life, channel its line to the caller, watch the thread that says
where it is, results and memory how a value travels back and what it may take.
"""
