"""What the checks of all notebooks share. A file for each kind of thing that a student writes:

    numbers.py     a formula: is it a number, is it the right one, which mistake explains it
    on_ranks.py    a function on real ranks: world sizes, one verdict of all ranks, closeness
    training.py    a strategy: trained beside the reference, loss and parameters after each step
    invariants.py  what a strategy may hold and send, and in which order
    waits.py       that each asynchronous collective is waited for
    comparison.py  several strategies beside each other
    scripts/       a script, as torchrun starts it
    job_end.py     a job that is killed: its end, as the operating system sees it

and what these are made of: verdicts.py (`@check`, `@shows`, `Wrong`, `Verdict`), reference.py (the
one process that a submission is compared with), explanations.py and mistakes.py (what explains a
difference from it), tolerances.py (how far off a right answer may be), student_code.py, inputs.py,
guesses.py, records.py, previous_work.py.

Words, each with one meaning in all checks:

    check_x      what a student calls; returns a Verdict
    judge_x      compares what a submission did or returned with what is right, in any number of
                 ways; raises Wrong at the first that is broken
    require_x    raises Wrong unless one condition holds, which its name says
    Mistake      a known way to get a formula wrong, with the number that it leads to in any case;
                 a TrainingMistake has the parameters that it leaves, a LayerMistake the output or
                 the gradient
    Cause        a mistake that explains one wrong number, in one case
    Case         what a check tries: arguments, and what is right for them
    Job          a training job as its numbers describe it (predictions/plans); what really runs
                 says where: DryRunJob, HostsJob, NodeJob, ResumableJob, StartedJob
    limit        the most bytes, elements or seconds that an invariant allows
    random       of cases: made with a seeded generator, `rng`; a picture is plotted, never "drawn"
"""
