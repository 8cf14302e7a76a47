"""What goes wrong on purpose: in tests of a student's answer, and in what is recorded for pictures.

Which fault, and where it is:

    a rank is killed, at a moment that nobody knows    kill_rank.kill_rank
    a process that writes is killed, at each step      kill_process.kill_while, kill_at_steps
    a rank computes longer, its data come late         slow_rank.SlowRank, Loading
    a rank begins late                                 delayed_rank.delay_rank, Gate
    the link is slow                                   labs/workers/slow_link.py: launch(link=...)
    the disk is full                                   full_disk.on_full_disk, no_room_beyond
    the disk is slow, or threads begin late            slow_disk.SlowDisk, HeldDisk, late_threads
    a file is cut off or has a flipped bit             damaged_file.truncate, flip_bit_in_file
    a bit of a tensor flips                            flipped_bit.flip_bit
    a host is lost                                     labs/surviving_failure/lost_host.py

When: `injector.FaultInjector` has one interface for all, `fail_at(rank, step, fault)` before a job
begins and `check(rank, step)` in each of its steps.
"""
