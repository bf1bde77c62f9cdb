"""The check of a cluster: what it finds on ranks of which one is slow, one link is slow, one is another host's."""

import itertools
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forks import Fork
from helpers import SlowDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from common import cluster_check
from common.cluster_check import Link, Rank
from common.lab.launch import launch
from common.ranks import Ranks

MB = 1  # of a large message: what is planted is larger than any noise


def run(size: int) -> tuple[str, list[str]]:
    lines, wrong = launch(checked, size)[0]
    return "\n".join(lines), wrong


def checked():
    return cluster_check.check(Ranks.here(), MB)


@pytest.fixture
def calm(monkeypatch):
    """Factors beyond what busy cores do to ranks that share them."""
    monkeypatch.setattr(cluster_check, "SLOW", 200.0)
    monkeypatch.setattr(cluster_check, "STRAGGLER", 200.0)


def test_ranks_that_are_alike(calm):
    page, wrong = run(4)
    assert not wrong, f"{wrong} of ranks of one machine"
    assert "4 ranks" in page and "gloo" in page and "6 pairs" in page, page


def test_what_is_planted_is_named(calm, monkeypatch):
    """In one launch: rank 1 computes slowly, the link between ranks 2 and 3 is slow, rank 3 is of another version and
    has another setting, and rank 2's clock is 7 seconds ahead."""
    multiply, trip, clock = cluster_check.multiply, cluster_check.trip, cluster_check.compare_clocks

    def slow_trip(message, other, begins, times):
        return trip(message, other, begins, times) + ({dist.get_rank(), other} == {2, 3})

    def only(rank, then, otherwise):
        return then if dist.get_rank() == rank else otherwise

    monkeypatch.setattr(cluster_check, "multiply", lambda ranks: multiply(ranks) / only(1, 1000, 1))
    monkeypatch.setattr(cluster_check, "trip", slow_trip)
    monkeypatch.setattr(cluster_check, "versions", lambda: {"torch": only(3, "2.12.0", "2.13.0")})
    monkeypatch.setattr(cluster_check, "variables", lambda: only(3, {}, {"NCCL_IB_HCA": "mlx5"}))
    monkeypatch.setattr(cluster_check, "compare_clocks", lambda ranks: (clock(ranks)[0] + only(2, 7, 0), 1e-3))
    wrong = run(4)[1]
    said = "\n".join(wrong)
    for words in (("NCCL_IB_HCA", "mlx5", "rank 3"), ("torch", "2.12.0", "rank 3"), ("clock", "rank 2"),
                  ("GFLOP/s", "rank 1"), ("link", "rank 2", "rank 3")):  # fmt: skip
        assert [line for line in wrong if all(word in line for word in words)], f"not found: {words}\n{said}"
    assert len(wrong) == 5, f"and nothing else:\n{said}"


@settings(max_examples=40)
@given(st.lists(st.tuples(*[st.integers(1, 9)] * 2), min_size=10, max_size=10), st.sampled_from([-7200, 0.5, 7200]))
def test_clocks_are_compared_as_well_as_the_quickest_answer_allows(ways, ahead):
    """Each way there and back takes its time: off by half of how much longer the one took than the other."""
    now, left = [1000.0], iter(itertools.chain(*ways))

    def send(*_):
        now[0] += next(left)

    def recv(stamp, _):
        stamp.fill_(now[0])
        now[0] += next(left)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", send), patch.setattr(dist, "recv", recv)
        patch.setattr(cluster_check, "time", SimpleNamespace(time=lambda: now[0] + ahead))
        found, unknown = cluster_check.compare_clocks(Ranks(1, 2, 1, torch.device("cpu")))
    quickest = [way for way in ways if sum(way) == min(map(sum, ways))]
    right = [(ahead + (back - there) / 2, (there + back) / 2) for there, back in quickest]
    assert any((found, unknown) == pytest.approx(pair) for pair in right), f"{found}, give or take {unknown}"


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_rounds(size):
    rounds = cluster_check.rounds_of(size)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(size), 2)), "each pair once"
    for pairs in rounds:
        players = list(itertools.chain(*pairs))
        assert len(players) == len(set(players)), f"somebody plays twice in {pairs}"


def cluster(hosts: int, per_host: int) -> tuple[list[Rank], list[Link]]:
    ranks = [
        Rank(number, f"host{number // per_host}", "cpu", {}, {}, (0.0, 0.0), 1e9) for number in range(hosts * per_host)
    ]
    links = [Link(a, b, 1e-4, 1e9) for a, b in itertools.combinations(range(len(ranks)), 2)]
    return ranks, links


def slowed(links, which) -> list[Link]:
    return [replace(link, bandwidth=1e8) if which(link) else link for link in links]


def wrong_of(ranks, links) -> list[str]:
    return cluster_check.report(ranks, links, 1e9, MB, "gloo")[1]


def says(lines: list[str], *each: tuple[str, ...]) -> None:
    """As many lines, each with its words."""
    assert len(lines) == len(each), lines
    missing = [(word, line) for line, words in zip(lines, each, strict=True) for word in words if word not in line]
    assert not missing, missing


def test_a_slow_host_is_named_once():
    ranks, links = cluster(4, 2)
    its = {4, 5}  # the ranks of host2
    wrong = wrong_of(ranks, slowed(links, lambda link: len({link.a, link.b} & its) == 1))
    says(wrong, ("host2", "12 pairs", "100 MB/s", "550 MB/s"))  # the median: 12 of 24 are slow


def test_a_slow_rank_is_named_once():
    ranks, links = cluster(1, 6)
    links = slowed(links, lambda link: 3 in (link.a, link.b))
    wrong = wrong_of(ranks, [replace(link, bandwidth=2e8) if (link.a, link.b) == (2, 3) else link for link in links])
    says(wrong, ("rank 3 on host0", "5 pairs", "100 MB/s", "200 MB/s", "1.00 GB/s"))
    assert wrong[0].index("100 MB/s") < wrong[0].index("200 MB/s"), "from the worst to the best"


def test_links_between_hosts_may_be_slower_than_those_within():
    ranks, links = cluster(2, 4)
    links = slowed(links, lambda link: ranks[link.a].host != ranks[link.b].host)
    assert wrong_of(ranks, links) == []
    late = [replace(link, latency=1.0) if (link.a, link.b) == (1, 6) else link for link in links]
    says(wrong_of(ranks, late), ("rank 1 on host0", "rank 6 on host1", "1,000,000", "100 µs"))


def test_nccls_own_view():
    log = (
        "n1:7:7 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eth0:10.0.0.1<0>\n"
        "n1:7:7 [0] NCCL INFO Using network IB\n"
    )
    lines, wrong = cluster_check.network_of(log)
    assert lines[0].endswith("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eth0:10.0.0.1<0>") and not wrong
    log = "n1:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\nn1:7:7 [0] NCCL INFO Using network Socket\n"
    lines, wrong = cluster_check.network_of(log)
    says(lines, ("eth0",), ("Using network Socket",))
    says(wrong, ("TCP", "NCCL_IB_HCA", "docs/cluster.md"))


def as_one_types_it(arguments):
    sys.argv = ["cluster_check", *arguments]
    runpy.run_module("common.cluster_check", run_name="__main__", alter_sys=True)


def test_the_exit_code(tmp_path):
    process = Fork(as_one_types_it, "--device=cpu", cwd=tmp_path)
    said = process.communicate(timeout=300)
    assert process.returncode == 0, said


def exit_codes(cases: list[tuple[list, list]]) -> list[int]:
    """This rank's, where rank 0 has found these lines and faults, and NCCL says that it goes through sockets. What the
    check sets itself, for NCCL's log, is no setting that hosts could have otherwise."""
    codes = []
    for lines, wrong in cases:

        def check(ranks, *more, lines=lines, wrong=wrong):
            own = [name for name in cluster_check.variables() if name.startswith("NCCL_DEBUG")]
            return None if ranks.rank else (lines, wrong + own)

        cluster_check.check = check
        codes.append(cluster_check.main(["--device=cpu"]))
    return codes


def test_every_rank_exits_with_what_rank_0_has_found_and_sockets_are_looked_at_between_hosts(monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster_check, "into_report", lambda text: None)
    monkeypatch.setattr(cluster_check, "network_of", lambda log: (["Using network Socket"], ["sockets"]))
    cases = [([], []), ([], ["a fault"]), (["links within a host"], []), (["links between hosts"], [])]
    assert launch(exit_codes, 2, (cases,)) == [[0, 1, 0, 1]] * 2


# --- the page, in numbers that are easy to follow ---------------------------------------------------------------


def ranks_with(**each) -> list[Rank]:
    """Ranks of one host that are alike but for what `each` says of them, in their order."""
    size = len(next(iter(each.values())))
    alike = cluster(1, size)[0]
    return [replace(rank, **{name: values[rank.rank] for name, values in each.items()}) for rank in alike]


def test_a_clock_is_told_when_it_is_further_off_than_asking_took():
    for clock, said in {
        (-7.0, 1e-3): "-7.0 s",
        (0.6, 0.05): "+0.6 s",
        (0.4, 0.0): "",
        (0.9, 0.6): "",  # the network is slow: it may as well be 0.3 s
    }.items():
        wrong = wrong_of(ranks_with(clock=[(0.0, 0.0), clock, (0.3, 0.0)]), [])
        says(wrong, *([("rank 1 on host0", said, "NTP")] if said else []))


def test_a_straggler_is_slower_than_half_of_the_ranks_by_much():
    assert wrong_of(ranks_with(flops=[1e12, 0.85e12, 1e12, 5e12]), []) == [], "15 % less, and a faster one"
    says(wrong_of(ranks_with(flops=[1e12, 1e12, 0.7e12]), []), ("rank 2 on host0", "700 GFLOP/s", "1,000"))


def test_what_differs_is_told_against_what_most_ranks_have():
    threads, card = {"OMP_NUM_THREADS": "1"}, {"NCCL_IB_HCA": "mlx5"}
    wrong = wrong_of(ranks_with(variables=[{"OMP_NUM_THREADS": "4"}, threads, threads | card]), [])
    says(wrong, ("NCCL_IB_HCA", "mlx5", "rank 2 on host0"), ("OMP_NUM_THREADS", " 1 ", " 4 ", "rank 0 on host0"))
    wrong = wrong_of(ranks_with(versions=[{"torch": "2.13.0"}] * 7 + [{"torch": "2.12.0"}] * 6), [])
    says(wrong, (*(f"rank {rank} on host0" for rank in range(7, 11)), " 2 more"))  # four of six are named


def test_slow_links_are_told_the_slowest_first_and_microseconds_are_none():
    ranks, links = cluster(1, 4)
    slow = {(0, 1): 3e8, (2, 3): 1e8}
    wrong = wrong_of(ranks, [replace(link, bandwidth=slow.get((link.a, link.b), 1e9)) for link in links])
    says(wrong, ("rank 2 on host0", "rank 3 on host0"), ("rank 0 on host0", "rank 1 on host0"))
    quick = [replace(link, latency=5e-5 if link.a == 2 else 1e-6, bandwidth=1e9 - 2e8 * link.a) for link in links]
    assert wrong_of(ranks, quick) == [], "50 µs in place of 1 µs, and 40 % of the bandwidth less"
    late = [replace(link, latency=2e-4 if (link.a, link.b) == (0, 1) else 1e-6) for link in links]
    assert len(wrong_of(ranks, late)) == 1, "200 µs in place of 1 µs are slow"


def test_of_two_slow_links_the_fault_may_be_at_their_other_ends():
    ranks, links = cluster(2, 3)
    its = slowed(links, lambda link: (link.a, link.b) in ((0, 1), (0, 2)))
    says(wrong_of(ranks, its), *(("rank 0 on host0", f"rank {other} on host0") for other in (1, 2)))


# --- what is measured -------------------------------------------------------------------------------------------


def test_a_link_has_a_bandwidth_where_all_is_latency(monkeypatch):
    """A byte is under way for a second, and so many bytes for three seconds, or for one."""
    for seconds in (3.0, 1.0):
        monkeypatch.setattr(cluster_check, "trip", lambda data, *_, s=seconds: 1.0 if data.numel() == 1 else s)
        ((link,), nothing) = launch(lambda: cluster_check.measure_links(Ranks.here(), 8), 2)
        assert not nothing and (link.a, link.b, link.latency) == (0, 1, 1.0)
        assert link.bandwidth == 4.0 if seconds == 3.0 else 8.0 <= link.bandwidth < float("inf")


def test_what_is_compared_of_a_rank(monkeypatch):
    """The versions of a GPU's libraries, and a variable of each library that reads any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert {**cluster_check.versions(), "python": ""} == {
        "python": "", "torch": torch.__version__, "CUDA": "13.0", "NCCL": "2.28.9"
    }  # fmt: skip
    names = ["NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
             "UCX_TLS", "FI_PROVIDER", "PYTORCH_CUDA_ALLOC_CONF", "MASTER_ADDR"]  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "x")
    assert {*names} <= {*cluster_check.variables()}, "variables"


def test_nccl_is_asked_for_its_log_unless_somebody_reads_it_himself(monkeypatch, no_launcher, capsys):
    """And a fault stands in torchrun's report too; without one, nothing does."""
    repeated, wrong = [], []
    monkeypatch.setattr(cluster_check, "into_report", repeated.append)
    monkeypatch.setattr(cluster_check, "all_reduce", lambda ranks, size: float(size))
    monkeypatch.setattr(cluster_check, "measure_links", lambda ranks, size: [Link(0, 0, 1e-4, float(size))])

    def report(ranks, links, bus, megabytes, backend):
        file = Path(os.environ["NCCL_DEBUG_FILE"])
        if os.environ["NCCL_DEBUG"] == "INFO":
            file.with_name("host-7").write_text("n:7:7 [0] NCCL INFO Using network IB\n" * 2)
        return [f"{links[0].bandwidth} and {bus} bytes, {megabytes} MiB"], list(wrong)

    monkeypatch.setattr(cluster_check, "report", report)
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    assert cluster_check.main(["--device=cpu", "--megabytes=2"]) == 0
    sizes = "2097152.0 and 2097152.0 bytes, 2 MiB"
    page = capsys.readouterr().out
    assert sizes in page and page.count("Using network IB") == 1
    assert repeated == [], "without a fault nothing is repeated"
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "mine")
    wrong += ["one", "two"]
    assert cluster_check.main(["--device=cpu", "--megabytes=2"]) == 1
    assert os.environ["NCCL_DEBUG"] == "WARN", "the user's own"
    capsys.readouterr()
    assert cluster_check.main(["--device=cpu"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "8388608.0 and 8388608.0 bytes, 8 MiB", "a large message"
    assert "one" in repeated[0] and "two" in repeated[0], "in torchrun's report"


class Products(TorchDispatchMode):
    """Each matrix product takes a second of a device; `operations` of the last one."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.overloadpacket is torch.ops.aten.mm:
            self.device.work(1)
            self.operations = 2 * arguments[0].numel() * arguments[1].shape[1]
        return function(*arguments, **named or {})


def test_a_device_is_waited_for_before_the_clock_is_read(monkeypatch):
    """The host only puts work on its queue: a second for each operation, and three at each barrier."""
    there, rank = SlowDevice(), Ranks(0, 4, 0, torch.device("cpu"))
    monkeypatch.setattr(cluster_check, "time", SimpleNamespace(perf_counter=lambda: there.now))
    monkeypatch.setattr(cluster_check, "synchronize", there.synchronize)
    for name, seconds in {"all_reduce": 1, "send": 1, "recv": 1, "barrier": 3}.items():
        monkeypatch.setattr(dist, name, lambda *_, seconds=seconds: there.work(seconds))
    assert cluster_check.all_reduce(rank, 8 * 2**20) == 12 * 2**20, "of 8 MiB among 4 ranks, 2 x 3/4 are on each link"
    assert cluster_check.trip(torch.ones(1, device="meta"), 1, True, 4) == 1, "half of the way there and back"
    with Products(there) as products:
        assert cluster_check.multiply(rank) == products.operations, "multiplications and additions in a second"
