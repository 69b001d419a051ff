"""VectorLiteRAG's servers as far as the paper describes them: profiles of its three indexes, its LLMs on its nodes.

Its traces, lists and timings are not public. What stands for them is here and nowhere else:

* *hit rates*: a query's lists are drawn from a Dirichlet process over the hot order, so that the hit rate of any hot
  prefix is Beta distributed (section IV-A2). The mean curve is c^a with the a that gives Figure 5's 20 % point; how
  much queries differ (``NU``) is chosen of 1, 2, 4 and 8: the one that follows Table II best.
* *host*: a batch of b takes T(b) = T(1) (1 + s (b - 1)); the misses of its worst query count (Eq. 1). T(1) of ORCAS 1K
  is fitted to two rows of Table II; for others it grows like Table I's search SLOs; s is assumed.
* *GPU*: one scans ten queries in a tenth of the host's time ("nearly an order of magnitude", Figure 4). While it scans
  it does not decode. faiss's shards launch blocks for every probe on every GPU (section IV-B1): ALL-GPU scans as long
  as one GPU with all lists would, which overstates what empty blocks cost.
* *LLM*: how throughput falls with the cache is a roofline at half of the peak rates; the throughput is the printed one
  for Llama3-70B, 40 requests/s for Llama3-8B ("above 40"), and for Qwen3-32B what the roofline gives beside the printed
  one. A prefill is as long as Table I's SLO allows at 95 % of that; for Qwen3-32B decoding alone takes all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.papers.figures.published import number, numbers
from hybridindex.partitioner.analysis import Analysis, analyse
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.studies.hardware import model
from hybridindex.studies.simulator import EngineRules, Inputs, System, Unservable, build_system, fit_llm, poisson
from hybridindex.studies.simulator.llm_server import LLMServer, generate
from hybridindex.studies.what_if import LLMService, parse_fleet
from hybridindex.types import AccessSample, HardwareInfo, LLMProfile, Profile, StageSample

__all__ = [
    "INDEXES",
    "LLMS",
    "POLICIES",
    "Codes",
    "Panel",
    "coded_profile",
    "host_seconds",
    "index_profile",
    "service_of",
]

PAPER = "vectorliterag"
INDEXES = ("Wiki-All", "ORCAS 1K", "ORCAS 2K")
LLMS = {"llama3-8b": "l40s", "qwen3-32b": "h100", "llama3-70b": "h100"}
#: As the paper calls them; ours is the paper's own scheme.
POLICIES = ("ours", "cpu-only", "dedicated-gpu", "all-gpu")
#: 1 / (nu + 1) is how much hit rates of queries differ.
NU = 2.0
#: Fitted by :func:`benchmarks.papers.figures.table_2.fit_table_2`: one query on the host, all of it missed.
ORCAS_1K_S = 0.252
#: Assumed: what each further query of a batch adds to the host's time.
SLOPE = 0.05
#: Of the host's time: coarse quantization.
COARSE_SHARE = 0.05
LAUNCH_S = 1e-3
#: Lists of the model; 1 in 32 is probed. The paper's own numbers of lists are not printed.
NLIST, NPROBE, QUERIES, CODE_BYTES = 2048, 64, 1200, 256


def host_seconds(index: str, batch: float = 1.0) -> float:
    """T(b) of an index, coarse quantization included."""
    slos = numbers(PAPER, "search_slo")
    return ORCAS_1K_S * slos[INDEXES.index(index)] / slos[1] * (1.0 + SLOPE * (batch - 1.0))


def _exponent(index: str) -> float:
    top = numbers(PAPER, "top20")[0 if index == "Wiki-All" else 1] / 100.0
    return math.log(top) / math.log(0.2)


def _ranks(exponent: float, nu: float, rng: np.random.Generator) -> np.ndarray:
    """(QUERIES, NPROBE) int32 distinct places in the hot order: a Polya urn for each query."""
    fresh = rng.random((QUERIES, NPROBE)) ** (1.0 / exponent)
    drawn = fresh.copy()
    for i in range(1, NPROBE):
        again = rng.random(QUERIES) >= nu / (nu + i)
        drawn[again, i] = drawn[again, rng.integers(0, i, QUERIES)[again]]
    ranks = np.sort((drawn * NLIST).astype(np.int64), axis=1)
    place = np.arange(NPROBE)
    # A list is probed once: what was drawn again goes to the next colder list.
    ranks = np.maximum.accumulate(ranks - place, axis=1) + place
    return np.minimum(ranks, NLIST - NPROBE + place).astype(np.int32)


@cache
def index_profile(index: str, host_speed: float = 1.0, nu: float = NU) -> Profile:
    """A profile as the paper's profiler would have found it. ``host_speed``: another number of cores."""
    rng = np.random.default_rng(0)
    nbytes = numbers(PAPER, "index_gb")[INDEXES.index(index)] * 1e9
    sizes = np.full(NLIST, round(nbytes / NLIST / CODE_BYTES), dtype=np.int64)
    work = int(sizes[0]) * CODE_BYTES
    ranks = _ranks(_exponent(index), nu, rng)
    fit, held = ranks[: QUERIES // 2], ranks[QUERIES // 2 :]
    stages = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        whole = host_seconds(index, batch) / host_speed
        scan = whole * (1.0 - COARSE_SHARE)
        for _ in range(3):
            stages.append(StageSample(stage="coarse", batch=batch, seconds=whole * COARSE_SHARE))
            for coverage in (0.0, 0.05, 0.2, 0.5):
                missed = (held[rng.integers(0, len(held), batch)] >= coverage * NLIST).sum(axis=1)
                hits = int((NPROBE - missed).sum()) * work
                stages.append(
                    StageSample(
                        stage="host_scan",
                        batch=batch,
                        seconds=scan * float(missed.max()) / NPROBE,
                        probes=int(missed.sum()),
                        work_bytes=int(missed.sum()) * work,
                        max_work_bytes=int(missed.max()) * work,
                        unique_bytes=int(missed.sum()) * work,
                        coverage=coverage,
                        min_hit_rate=1.0 - float(missed.max()) / NPROBE,
                    )
                )
                if hits:
                    # A GPU does not gain from more cores.
                    seconds = LAUNCH_S + host_seconds(index, 10) / 100 * hits / (NPROBE * work)
                    stages.append(
                        StageSample(
                            stage="device_scan",
                            batch=batch,
                            seconds=seconds,
                            work_bytes=hits,
                            unique_bytes=hits,
                            coverage=coverage,
                            device="cuda:0",
                        )
                    )
    return Profile(
        created_at="2026-01-01T00:00:00Z",
        index_fingerprint=index,
        hardware=HardwareInfo(fingerprint="paper", cpu_model="paper", cpu_flags=(), cores=64, memory_bytes=1 << 40),
        metric="ip",
        codec="pq",
        dim=1024,
        count=int(sizes.sum()),
        nlist=NLIST,
        nprobe=NPROBE,
        k=25,
        scanner="faiss",
        threads=64,
        omp_wait_policy="PASSIVE",
        load_average=0.0,
        seed=0,
        list_bytes=sizes * CODE_BYTES,
        list_sizes=sizes,
        access=AccessSample(
            fit_probes=fit,
            held_probes=held,
            list_accesses=np.bincount(fit.ravel(), minlength=NLIST).astype(np.float64),
        ),
        stages=tuple(stages),
    )


def service_of(llm: str, gpus: int = 8, *, input_tokens: int = 1024, output_tokens: int = 256) -> LLMService:
    """An LLM of the paper on its node, by roofline."""
    fleet = parse_fleet(f"{LLMS[llm]}x{gpus}")
    return LLMService(model=model(llm), fleet=fleet, input_tokens=input_tokens, output_tokens=output_tokens)


@cache
def _slower(llm: str) -> float:
    """Printed throughput over that of the roofline."""
    if llm == "qwen3-32b":
        return _slower("llama3-70b")
    printed = number(PAPER, "rate_70b") if llm == "llama3-70b" else 40.0
    return printed / service_of(llm).profile().throughput_rps


def _printed(service: LLMService, factor: float) -> LLMProfile:
    found = service.profile()
    points = tuple((kv, rps * factor) for kv, rps in found.points)
    return replace(found, throughput_rps=found.throughput_rps * factor, points=points)


@cache
def _first_token_s(llm: str) -> tuple[float, float]:
    """As a profile has it, and without load: what makes p90 at 95 % of the throughput Table I's SLO, "the latency at
    the throughput limit"."""
    service, slo_s = service_of(llm), numbers(PAPER, "llm_slo")[list(LLMS).index(llm)] / 1e3
    profile, low, high = _printed(service, _slower(llm)), 0.0, slo_s
    arrivals = poisson(0.95 * profile.throughput_rps, 4000, seed=0).arrivals

    def server_of(ttft_s: float) -> LLMServer:
        server = fit_llm(
            replace(profile, ttft_s=ttft_s),
            index_bytes=0,
            kv_bytes_per_token=service.model.kv_bytes_per_token(),
            replicas=service.engines,
        )
        assert server is not None
        return server

    while high - low > 1e-3:
        middle = (low + high) / 2
        waits = generate(arrivals, server_of(middle)).first_token_s - arrivals
        low, high = (low, middle) if float(np.quantile(waits, 0.9)) > slo_s else (middle, high)
    server = server_of(low)
    return low, server.prefill_per_token_s * server.input_tokens + server.first_token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Lists as RaBitQ codes in place of the paper's: what a search by them takes."""

    bits: int
    #: Of a row.
    code_bytes: int
    #: Of a scan of codes over one of the paper's lists, on either tier.
    scan_share: float
    #: Of each query: exact distances of its candidates on the host, which no placement takes away.
    rerank_s: float


@cache
def coded_profile(index: str, codes: Codes, host_speed: float = 1.0) -> Profile:
    """:func:`index_profile` of the same rows and accesses, searched by codes."""
    rows = index_profile(index, host_speed)
    smaller = codes.code_bytes / CODE_BYTES
    stages = []
    for sample in rows.stages:
        seconds = sample.seconds
        if sample.stage == "coarse":
            seconds += codes.rerank_s * sample.batch / host_speed
        else:
            launch = LAUNCH_S if sample.stage == "device_scan" else 0.0
            seconds = launch + (seconds - launch) * codes.scan_share
        nbytes = {
            name: round(getattr(sample, name) * smaller) for name in ("work_bytes", "max_work_bytes", "unique_bytes")
        }
        stages.append(replace(sample, seconds=seconds, **nbytes))
    return replace(
        rows,
        index_fingerprint=f"{index}, codes",
        codec=f"rabitq{codes.bits}",
        scanner="rabitq",
        list_bytes=rows.list_sizes * codes.code_bytes,
        stages=tuple(stages),
    )


@cache
def _analysis(index: str, gpus: int, host_speed: float, codes: Codes | None) -> Analysis:
    found = analyse(index_profile(index, host_speed) if codes is None else coded_profile(index, codes, host_speed))
    return found.configured(page_bytes=found.curve.geometry.page_bytes, n_devices=gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One index beside one LLM: a panel of Figure 11, or a variation of one."""

    index: str
    llm: str
    gpus: int = 8
    input_tokens: int = 1024
    output_tokens: int = 256
    #: None: Table I's.
    search_slo_ms: float | None = None
    percentile: float = 90.0
    contention: float = 1.0
    #: Of host stages, over that of the node.
    host_speed: float = 1.0
    #: What searches scan; None: the paper's lists.
    codes: Codes | None = None

    @property
    def service(self) -> LLMService:
        return service_of(self.llm, self.gpus, input_tokens=self.input_tokens, output_tokens=self.output_tokens)

    @property
    def llm_slo_s(self) -> float:
        return numbers(PAPER, "llm_slo")[list(LLMS).index(self.llm)] / 1e3

    @property
    def search_slo_s(self) -> float:
        given = self.search_slo_ms
        return (numbers(PAPER, "search_slo")[INDEXES.index(self.index)] if given is None else given) / 1e3

    @property
    def slo_s(self) -> float:
        """On the time to first token: Table I's two, added."""
        return self.search_slo_s + self.llm_slo_s

    @property
    def profile(self) -> LLMProfile:
        """The LLM's: the roofline's, at the printed throughput."""
        found = _printed(self.service, _slower(self.llm))
        loaded_s, idle_s = _first_token_s(self.llm)
        # The wait for a step of others does not depend on the prompt.
        return replace(found, ttft_s=loaded_s + idle_s * (self.input_tokens / 1024 - 1))

    @property
    def analysis(self) -> Analysis:
        """The paper gives 32 cores to 4 GPUs, 48 to 6, 64 to 8 (section VI-E4)."""
        return _analysis(self.index, self.gpus, self.host_speed * self.gpus / 8, self.codes)

    def plan(self) -> Plan:
        """Algorithm 1 for what the LLM takes."""
        profile = replace(self.profile, ttft_s=0.0)
        return make_plan(
            self.analysis.profile,
            PlanRequest.resolve(
                slo_ms=self.search_slo_s * 1e3,
                device_budget_bytes=profile.kv_cache_bytes // self.gpus,
                llm=profile,
                n_devices=self.gpus,
                percentile=self.percentile,
                # The paper's own queueing, and no margin.
                epsilon=1.0,
                headroom=0.0,
            ),
            analysis=self.analysis,
        )

    def system(self, policy: str, rules: EngineRules | None = None) -> System | Unservable:
        """One policy; an LLM of whole engines beside as many dedicated GPUs as hold the index (section VI-B)."""
        service, profile = self.service, self.profile
        inputs = Inputs(
            analysis=self.analysis,
            slo_s=self.slo_s,
            rate=profile.throughput_rps,
            n_devices=self.gpus,
            budget_bytes=profile.kv_cache_bytes // self.gpus,
            llm=profile,
            kv_bytes_per_token=service.model.kv_bytes_per_token(),
            replicas=service.engines,
            rules=rules or EngineRules(),
            contention=self.contention,
            percentile=self.percentile,
            plan=self.plan() if policy == "ours" else None,
        )
        if policy == "dedicated-gpu":
            return self._dedicated(inputs)
        system = build_system(policy, inputs)
        if policy == "all-gpu" and isinstance(system, System):
            table = system.table
            return replace(system, table=replace(table, device_factor=table.device_factor * self.gpus, _known={}))
        return system

    def _dedicated(self, inputs: Inputs) -> System | Unservable:
        service, profile = self.service, self.profile
        usable = int(service.fleet.usable_bytes)
        alone = math.ceil(inputs.analysis.profile.nbytes / (usable * 0.99))
        left = (self.gpus - alone) // service.chips_per_engine
        if left < 1:
            return Unservable(name="dedicated-gpu", reason=f"{alone} GPUs for the index leave no engine of the LLM")
        system = build_system("all-gpu", replace(inputs, llm=None, n_devices=alone, budget_bytes=usable))
        if isinstance(system, Unservable):
            return system
        llm = fit_llm(
            profile,
            index_bytes=0,
            kv_bytes_per_token=inputs.kv_bytes_per_token,
            replicas=left,
            share=left / service.engines,
        )
        return replace(system, name="dedicated-gpu", llm=llm)
