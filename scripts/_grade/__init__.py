"""Students' notebooks, graded, each exercise in a process tree of its own: scripts/grade.

Half of the exercises are judged apart (judged_apart lists them): a check that calls functions with
plain arguments, or starts a script, runs in a process of its own, the judge. A proxy in the place
of each function has the submission's process call it (judge, remote, answering); scripts are
started there, too (started). Between them goes plain data alone:
JSON and the bytes of tensors, bounded, read without running code (plain_data). The inputs come from
a secret seed of each run, and a verdict does not say the right number. So nothing that a submission
does to its own process forges a verdict. Nor can it ask labs: the process has the modules that the
notebook has named so far, none with a check, and none that the exercise's own check computes with
(reach), neither as files nor in its memory. Two things are said of it: *not allowed here* (it asks
labs for the answer: a sentence, and the student can hand in again), and *flagged*, where it sent
the judge what our code there does not send.

The other checks call a submission's function in their own Python process, or on ranks. Such a
submission meets three walls; one that is judged apart meets the first, and of the third the files.

1. Around the process (bubblewrap, namespaces, sandbox, cgroups). A tree in user, mount, pid,
   network, IPC and host name namespaces, which bubblewrap makes, without capabilities: a read-only
   system, labs/, and small tmpfs to write into, from which nothing can be started; no solutions/,
   no tests/, no home, no other submission, no network but its own loopback. Limits on memory,
   processes, files, disk and time; when its first process ends, all end. What forks these processes
   is no root, and behind a wall of its own.
2. Around the check (guard, integrity, inside). An audit hook ends the exercise when the
   submission's code walks frames, searches memory, calls ctypes, starts or ends a process, opens a
   socket or a file that is none of its business, or makes code; also where it has a library do
   that. Functions and constants of labs, torch and Python are compared after each call, on ranks
   too. What ranks send back is read by an unpickler that runs no code. A passed check must then
   reject a lazy answer. The verdict leaves with a seal made from a secret, on a descriptor that
   ranks do not have.
3. Around the code (files, look, submissions, static_look). Only regular files are read, within
   limits, and they are parsed behind the first wall, too. Only the statements that an exercise
   needs are run, our own cells come from our sources, and what no answer needs is refused unread:
   imports of checks, `__globals__`, assignments to modules.

What an opponent of great skill could still try: where check and answer share a process, all code in
it has the same rights. Who writes into memory past Python (a flaw of torch or NumPy, strides that
lead outside an array), finds a function of labs or torch that hands out frames or compiles code for
others, or has a rank unpickle code that says it lies in a file of labs, can forge a verdict. There
labs can also compute some of what exercises ask for: to import that is refused, but who finds it by
a name put together while it runs is not seen asking. Apart, that is left where a notebook itself
names a module that has the formula, too (reach.NEEDED: 6.16-6.18, 7.24, 7.25, 8.9). What a script
is said to have done is noted in its own ranks, which no hook watches: a script could write these
notes itself. They are compared with what one process computes of the same samples, so it would have
to train, but it could do so on one rank. A class in which somebody can do that deserves a look at
the code of those who passed. Namespaces are as safe as the kernel. Without them (--unsafe) only 2
and 3 remain, and limits; the judge then runs as the submission's user, and all of labs is there.
"""
