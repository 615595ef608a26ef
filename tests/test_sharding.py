"""Sharding over workers: every row once, and the golden values of the original."""

import logging

import numpy as np
import pytest
import torch

import keras_distrib as kd
from keras_distrib.data import from_files
from keras_distrib.data.pipeline import Pipeline, Pipelines, shard_source
from keras_distrib.data.sharding import pieces, shard_files, split_rows, worker_rows, worker_steps
from keras_distrib.data.sources import GeneratorSource, as_source
from keras_distrib.options import AutoShardPolicy, InputOptions

DATA, FILE, OFF, AUTO, HINT = (AutoShardPolicy[name] for name in ("DATA", "FILE", "OFF", "AUTO", "HINT"))


def rows_source(count, batch_size):
    return as_source(np.arange(count), InputOptions(batch_size=batch_size))


def stream_source(count, batch_size):
    """The same batches, without random access."""
    return GeneratorSource(lambda: torch.arange(count).split(batch_size))


def steps_of(source, policy, worker, workers, replicas=1, state=None):
    own = Pipelines(worker, workers, replicas)
    pipeline = Pipeline(*shard_source(source, policy, own), own)
    if state is not None:
        pipeline.set_state(state)
    return list(pipeline)


def batches_of(*arguments, **options):
    return [[step.batch[r.start : r.stop].tolist() for r in step.rows] for step in steps_of(*arguments, **options)]


def one_replica(*arguments):
    return [parts[0] for parts in batches_of(*arguments)]


@pytest.fixture
def two_files(tmp_path):
    for index in range(2):
        np.save(tmp_path / f"{index}.npy", np.arange(6) + 6 * index)
    return from_files(str(tmp_path / "*.npy"), lambda path: [np.load(path)], batch_size=4)


class TestGolden:
    @pytest.mark.parametrize("make", [rows_source, stream_source])
    @pytest.mark.parametrize(
        ("count", "batch_size", "first", "second"),
        [
            (8, 4, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
            (6, 4, [[0, 1], [4]], [[2, 3], [5]]),
            (5, 4, [[0, 1], [4]], [[2, 3], []]),
            (9, 4, [[0, 1], [4, 5], [8]], [[2, 3], [6, 7], []]),
            (7, 7, [[0, 1, 2, 3]], [[4, 5, 6]]),
        ],
    )
    def test_data(self, make, count, batch_size, first, second):
        """Golden values: two workers of one replica, tf.distribute 2.21, AUTO and DATA."""
        for policy in (DATA, AUTO):
            assert one_replica(make(count, batch_size), policy, 0, 2) == first
            assert one_replica(make(count, batch_size), policy, 1, 2) == second

    def test_the_guides_twelve_elements(self, two_files):
        """The guide's example, batch 4; the original itself gives [4, 5], [] at the end of a file."""
        assert one_replica(two_files, FILE, 0, 2) == [[0, 1], [2, 3], [4], [5]]
        assert one_replica(two_files, FILE, 1, 2) == [[6, 7], [8, 9], [10], [11]]
        assert one_replica(two_files, AUTO, 1, 2) == [[6, 7], [8, 9], [10], [11]]
        assert one_replica(two_files, DATA, 0, 2) == [[0, 1], [4, 5], [8, 9]]
        assert one_replica(two_files, DATA, 1, 2) == [[2, 3], [6, 7], [10, 11]]
        for worker in range(2):
            assert one_replica(two_files, OFF, worker, 2) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]

    def test_off_over_range(self):
        """Golden values: testAutoshardingOption of the original, one element a batch."""
        assert one_replica(rows_source(4, 1), AUTO, 0, 2) == [[0], [1], [2], [3]]
        assert one_replica(rows_source(4, 2), OFF, 0, 2) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("workers", range(1, 9))
class TestEveryRowOnce:
    @pytest.mark.parametrize(("count", "batch_size"), [(1, 1), (10, 4), (23, 5), (97, 32)])
    def test_data(self, workers, replicas, count, batch_size):
        for make in (rows_source, stream_source):
            seen = [batches_of(make(count, batch_size), DATA, w, workers, replicas) for w in range(workers)]
            assert len({len(steps) for steps in seen}) == 1, "workers would wait for one another"
            for step in zip(*seen, strict=True):
                rows = [row for worker in step for part in worker for row in part]
                assert rows == sorted(rows)
            rows = [row for steps in seen for parts in steps for part in parts for row in part]
            assert sorted(rows) == list(range(count))

    def test_files(self, workers, replicas, tmp_path):
        sizes = [3, 5, 1, 4, 7, 2, 6, 3]
        starts = np.cumsum([0, *sizes])
        for index, size in enumerate(sizes):
            np.save(tmp_path / f"{index}.npy", np.arange(starts[index], starts[index] + size))
        source = from_files(str(tmp_path / "*.npy"), lambda path: [np.load(path)], batch_size=4)
        seen = [batches_of(source, FILE, w, workers, replicas) for w in range(workers)]
        rows = [row for steps in seen for parts in steps for part in parts for row in part]
        assert sorted(rows) == list(range(sum(sizes)))
        assert all(any(parts) for steps in seen for parts in steps), "a step without rows"

    def test_off(self, workers, replicas):
        for worker in range(workers):
            steps = batches_of(rows_source(23, 5), OFF, worker, workers, replicas)
            assert [row for parts in steps for part in parts for row in part] == list(range(23))

    def test_the_pure_functions(self, workers, replicas):
        for rows in range(60):
            total = workers * replicas
            assert sum(split_rows(rows, total)) == rows
            found = [worker_rows(rows, w, workers, replicas) for w in range(workers)]
            assert [r for own in found for r in range(own.start, own.stop)] == list(range(rows))
            assert [p.length for p in pieces(rows, total)] == split_rows(rows, total)
            steps = worker_steps(rows, workers, replicas)
            assert [r for step in steps for p in step for r in range(p.start, p.stop)] == list(range(rows))


class TestReading:
    def test_a_worker_loads_no_other_workers_rows(self):
        class Rows(torch.utils.data.Dataset):
            def __init__(self):
                self.loaded = []

            def __len__(self):
                return 10

            def __getitem__(self, index):
                self.loaded.append(index)
                return torch.tensor(index)

        for worker, expected in ((0, [0, 1, 4, 5, 8]), (1, [2, 3, 6, 7, 9])):
            rows = Rows()
            source = as_source(rows, InputOptions(batch_size=4))
            assert [row for batch in one_replica(source, DATA, worker, 2) for row in batch] == expected
            assert rows.loaded == expected

    def test_every_worker_knows_the_rows_of_the_step(self):
        for make in (rows_source, stream_source):
            for worker in range(3):
                assert [step.global_rows for step in steps_of(make(10, 4), DATA, worker, 3)] == [4, 4, 2]

    @pytest.mark.parametrize("policy", [DATA, OFF])
    @pytest.mark.parametrize("make", [rows_source, stream_source])
    def test_resuming_anywhere(self, make, policy):
        whole = steps_of(make(23, 5), policy, 1, 2)
        for taken in range(1, len(whole) + 1):
            rest = steps_of(make(23, 5), policy, 1, 2, state=whole[taken - 1].state)
            assert [s.batch.tolist() for s in rest] == [s.batch.tolist() for s in whole[taken:]]
            assert [s.rows for s in rest] == [s.rows for s in whole[taken:]]


class TestFiles:
    def test_each_workers_files(self):
        assert [shard_files(["a", "b", "c"], worker, 2) for worker in range(2)] == [["a", "c"], ["b"]]
        with pytest.raises(ValueError, match="fewer files than workers. Received: 1 files, 2 workers"):
            shard_files(["a"], 0, 2)

    def test_too_few_files(self, two_files, caplog):
        with pytest.raises(ValueError, match="Could not apply FILE based sharding"):
            steps_of(two_files, FILE, 0, 3)
        with caplog.at_level(logging.WARNING, logger="keras_distrib"):
            assert one_replica(two_files, AUTO, 0, 3) == one_replica(two_files, DATA, 0, 3)
        assert "takes DATA instead of FILE" in caplog.text

    @pytest.mark.parametrize("policy", [FILE, HINT])
    def test_no_files(self, policy):
        with pytest.raises(ValueError, match=f"Could not apply {policy.name} based sharding"):
            steps_of(rows_source(4, 2), policy, 0, 2)

    def test_one_worker_reads_all_whatever_the_policy(self, two_files):
        for policy in AutoShardPolicy:
            assert batches_of(two_files, policy, 0, 1, 2) == [
                [[0, 1], [2, 3]],
                [[4, 5], [6, 7]],
                [[8, 9], [10, 11]],
            ]

    def test_a_seed_gives_every_worker_the_same_order(self, tmp_path):
        for index in range(8):
            np.save(tmp_path / f"{index}.npy", np.arange(2) + 2 * index)

        def make():
            return from_files(str(tmp_path / "*.npy"), lambda path: [np.load(path)], batch_size=4, seed=3)

        first = [one_replica(make(), FILE, worker, 4) for worker in range(4)]
        assert first == [one_replica(make(), FILE, worker, 4) for worker in range(4)]
        rows = [row for steps in first for part in steps for row in part]
        assert sorted(rows) == list(range(16))
        assert rows != sorted(rows)
        source = make()
        assert one_replica(source, DATA, 0, 1) != one_replica(source, DATA, 0, 1)  # another pass, another order

    def test_hugging_face_streams(self):
        import datasets

        def rows(start):
            yield from ({"n": number} for number in range(start[0], start[0] + 2))

        def read(starts):
            for start in starts:
                yield from rows([start])

        stream = datasets.IterableDataset.from_generator(read, gen_kwargs={"starts": [0, 2, 4]})
        source = as_source(stream, InputOptions(batch_size=2))

        def numbers(policy, worker, workers):
            steps = steps_of(source, policy, worker, workers)
            return [number for s in steps for r in s.rows for number in s.batch["n"][r.start : r.stop].tolist()]

        assert [numbers(FILE, worker, 2) for worker in range(2)] == [[0, 1, 4, 5], [2, 3]]
        assert [numbers(DATA, worker, 2) for worker in range(2)] == [[0, 2, 4], [1, 3, 5]]
        with pytest.raises(ValueError, match="fewer files than workers"):
            numbers(FILE, 0, 4)

    def test_lists_of_tar_files(self, tmp_path):
        import io
        import tarfile

        for shard in range(3):
            with tarfile.open(tmp_path / f"shard-{shard}.tar", "w") as tar:
                for row in range(2):
                    data = str(10 * shard + row).encode()
                    entry = tarfile.TarInfo(f"{row}.txt")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))

        def read(path):
            with tarfile.open(path) as tar:
                for entry in tar:
                    yield np.array([int(tar.extractfile(entry).read())])

        source = from_files(str(tmp_path / "shard-{0..2}.tar"), read, batch_size=2)
        assert one_replica(source, FILE, 0, 2) == [[0], [1], [20], [21]]
        assert one_replica(source, FILE, 1, 2) == [[10], [11]]

    def test_options_reach_the_pipeline(self, two_files):
        class TwoWorkers(kd.MirroredStrategy):
            worker = 1

            @property
            def input_pipelines(self):
                return Pipelines(self.worker, 2, self.num_local_replicas)

        strategy = TwoWorkers(["cpu:0", "cpu:1"])
        for policy, expected in ((FILE, [[6], [7]]), (DATA, [[2], [3]]), (OFF, [[0], [1]])):
            dataset = strategy.experimental_distribute_dataset(two_files, InputOptions(auto_shard_policy=policy))
            assert [part.tolist() for part in next(iter(dataset)).values] == expected
