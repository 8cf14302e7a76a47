"""What the check of exercise 5.12 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected, assert_waits
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import labs.fsdp_profiling as lab
from labs.fsdp_profiling import recorded_runs

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")
SMALL = recorded_runs.preset(layers=2, hidden=32, heads=2, context=16, batch=1)


class Record:
    def nothing(train_one_step, path, **options):
        pass

    def trains_only(train_one_step, path, **options):
        train_one_step()

    def does_not_train(train_one_step, path, **options):
        with profile(record_shapes=True, **options) as profiler:
            dist.barrier()
            with record_function("labs::step"):
                pass
        profiler.export_chrome_trace(path)

    def no_export(train_one_step, path, **options):
        with profile(record_shapes=True, **options):
            dist.barrier()
            with record_function("labs::step"):
                train_one_step()

    def two_steps(train_one_step, path, **options):
        train_one_step()  # to warm up
        right.record_step(train_one_step, path, **options)

    def step_before_the_profiler(train_one_step, path, **options):
        train_one_step()
        with profile(record_shapes=True, **options) as profiler:
            dist.barrier()
            with record_function("labs::step"):
                pass
        profiler.export_chrome_trace(path)

    def no_label(train_one_step, path, **options):
        with profile(record_shapes=True, **options) as profiler:
            dist.barrier()
            train_one_step()
        profiler.export_chrome_trace(path)

    def another_label(train_one_step, path, **options):
        with profile(record_shapes=True, **options) as profiler:
            dist.barrier()
            with record_function("step"):
                train_one_step()
        profiler.export_chrome_trace(path)

    def label_around_the_profiler(train_one_step, path, **options):
        with record_function("labs::step"), profile(record_shapes=True, **options) as profiler:
            dist.barrier()
            train_one_step()
        profiler.export_chrome_trace(path)

    def label_before_the_step(train_one_step, path, **options):
        with profile(record_shapes=True, **options) as profiler:
            dist.barrier()
            with record_function("labs::step"):
                pass
            train_one_step()
        profiler.export_chrome_trace(path)

    def no_shapes(train_one_step, path, **options):
        with profile(**options) as profiler:
            dist.barrier()
            with record_function("labs::step"):
                train_one_step()
        profiler.export_chrome_trace(path)

    def no_barrier(train_one_step, path, **options):
        with profile(record_shapes=True, **options) as profiler:
            with record_function("labs::step"):
                train_one_step()
        profiler.export_chrome_trace(path)

    def barrier_before_the_profiler(train_one_step, path, **options):
        dist.barrier()
        Record.no_barrier(train_one_step, path, **options)

    def barrier_in_the_label(train_one_step, path, **options):
        def together():
            dist.barrier()
            train_one_step()

        Record.no_barrier(together, path, **options)

    def without_options(train_one_step, path, **options):
        right.record_step(train_one_step, path)

    def stacks_alone(train_one_step, path, with_stack=False, **options):
        right.record_step(train_one_step, path, with_stack=with_stack)

    def stacks_left_out(train_one_step, path, with_stack=False, **options):
        right.record_step(train_one_step, path, **options)

    def one_file_for_all(train_one_step, path, **options):
        right.record_step(train_one_step, path.replace("rank1", "rank0"), **options)

    def rank_0_alone_writes(train_one_step, path, **options):
        with profile(record_shapes=True, **options) as profiler:
            dist.barrier()
            with record_function("labs::step"):
                train_one_step()
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(path)

    def compressed(train_one_step, path, **options):
        right.record_step(train_one_step, f"{path}.gz", **options)

    def a_table(train_one_step, path, **options):
        with profile(record_shapes=True, **options) as profiler:
            dist.barrier()
            with record_function("labs::step"):
                train_one_step()
        with open(path, "w") as file:
            file.write(profiler.key_averages().table())

    def never_stopped(train_one_step, path, **options):
        profiler = profile(record_shapes=True, **options)
        profiler.start()
        dist.barrier()
        with record_function("labs::step"):
            train_one_step()
        profiler.export_chrome_trace(path)

    def gpu_alone(train_one_step, path, **options):
        with profile(activities=[ProfilerActivity.CUDA], record_shapes=True,
                     **options) as profiler:
            dist.barrier()
            with record_function("labs::step"):
                train_one_step()
        profiler.export_chrome_trace(path)

    def warm_up_in_the_schedule(train_one_step, path, **options):
        with profile(record_shapes=True, schedule=schedule(wait=0, warmup=1, active=1),
                     on_trace_ready=lambda p: p.export_chrome_trace(path),
                     **options) as profiler:
            dist.barrier()
            for _ in range(2):
                with record_function("labs::step"):
                    train_one_step()
                profiler.step()

    def fixed_parameters(train_one_step):
        pass


WRONG = [
    (Record.nothing, "wrong_count 0 times"), (Record.trains_only, "file_missing"),
    (Record.does_not_train, "wrong_count 0 times"), (Record.no_export, "file_missing"),
    (Record.two_steps, "wrong_count 2 times"),
    (Record.step_before_the_profiler, "step_not_recorded"),
    (Record.no_label, "missing_label 0 times"), (Record.another_label, "missing_label 0 times"),
    (Record.label_around_the_profiler, "missing_label"),
    (Record.label_before_the_step, "outside_label"), (Record.no_shapes, "no_shapes bytes"),
    (Record.no_barrier, "no_barrier"), (Record.barrier_before_the_profiler, "no_barrier"),
    (Record.barrier_in_the_label, "no_barrier"),
    (Record.without_options, "no_stacks options"), (Record.stacks_alone, "no_link slow link"),
    (Record.stacks_left_out, "no_stacks"),
    (Record.one_file_for_all, "file_missing|unreadable_file"),
    (Record.rank_0_alone_writes, "file_missing rank 1"), (Record.compressed, "file_missing rank 0"),
    (Record.a_table, "unreadable_file"),
    (Record.never_stopped, "raised_AttributeError stop()"),
    # on a GPU it has kernels, but no operation of the CPU
    (Record.gpu_alone, "raised_AssertionError|unreadable_file|missing_label"),
    (Record.warm_up_in_the_schedule, "wrong_count 2 times"),
    (Record.fixed_parameters, "wrong_signature")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_record_step(answer), expected)


class Right:
    """The same, written otherwise."""

    def started_and_stopped(train_one_step, path, **options):
        profiler = profile(record_shapes=True, **options)
        profiler.start()
        dist.barrier()
        with record_function("labs::step"):
            train_one_step()
        profiler.stop()
        profiler.export_chrome_trace(path)

    def by_a_handler(train_one_step, path, **options):
        def write(profiler):
            profiler.export_chrome_trace(path)

        with profile(record_shapes=True, on_trace_ready=write, **options):
            dist.all_reduce(torch.zeros(1))
            with torch.profiler.record_function("labs::step"):
                train_one_step()

    def by_a_schedule(train_one_step, path, **options):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
                     if torch.cuda.is_available() else None, record_shapes=True,
                     schedule=schedule(wait=0, warmup=0, active=1, repeat=1),
                     on_trace_ready=lambda found: found.export_chrome_trace(path),
                     **options) as profiler:
            dist.barrier()
            with record_function("labs::step"):
                train_one_step()
            profiler.step()

    def with_everything(train_one_step, path, **options):
        label = record_function("labs::step")
        with profile(record_shapes=True, profile_memory=True, with_flops=True,
                     **options) as profiler:
            dist.barrier()
            label.__enter__()
            train_one_step()
            label.__exit__(None, None, None)
        profiler.export_chrome_trace(path)


@pytest.mark.parametrize("answer", [
    right.record_step, Right.started_and_stopped, Right.by_a_handler, Right.by_a_schedule,
    Right.with_everything])
def test_right(answer):
    verdict = lab.check_record_step(answer)
    assert verdict.passed is True, verdict


def test_waits():
    assert_waits(lab.check_record_step, "5.12")


# ---- what record_fsdp does with the function


def unfilled(train_one_step, path, **options):
    raise NotImplementedError("Exercise 5.12")


def test_record_fsdp_reads_what_the_function_left():
    """Marked by a label that the lab's own call does not have."""
    def marked(train_one_step, path, **options):
        def step():
            with record_function("labs::mine"):
                train_one_step()

        right.record_step(step, path, **options)

    run = lab.record_fsdp(SMALL, "of a test of 5.12", record=marked)
    assert all(len(trace.labelled("labs::mine")) == 1 for trace in run) and not run.note
    assert [lab.load(trace.path) for trace in run] == list(run)
    assert "own call" not in repr(run)


@pytest.mark.parametrize("answer, said", [
    (unfilled, "Exercise 5.12 waits for your code"),
    (Record.no_export, "the check of 5.12 rejects record_step: there is no file at `path`"),
    (Record.rank_0_alone_writes, "there is no file"), (Record.no_label, "labs::step")])
def test_where_it_cannot_the_lab_records(answer, said):
    run = lab.record_fsdp(SMALL, "of a test of 5.12 unfilled", record=answer)
    assert len(run) == SMALL.ranks and all(len(trace.steps) == 1 for trace in run)
    assert f"recorded by the lab's own call: {run.note}" in repr(run) and said in run.note
