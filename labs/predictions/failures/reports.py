"""What large runs reported of their failures and checkpoints.

Sources: Grattafiori et al., "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783), section 3.3.4
and table 5; Zhang et al., "OPT", 2022 (arXiv 2205.01068), section 2.5; Kokolis et al., "Revisiting
Reliability in Large-Scale Machine Learning Research Clusters", 2024 (arXiv 2410.21680); Le Scao et
al., "BLOOM", 2022 (arXiv 2211.05100), section 3.2.
"""

from dataclasses import dataclass

HOURS_A_DAY = 24


@dataclass(frozen=True)
class InterruptionCause:
    """A row of a table of interruptions: how many, and the percentage that is printed beside it."""

    name: str
    count: int
    percent: float
    is_gpu: bool = False


LLAMA_3_DAYS, LLAMA_3_GPUS = 54, 16_384
LLAMA_3 = (
    InterruptionCause("Faulty GPU", 148, 30.1, is_gpu=True),
    InterruptionCause("GPU HBM3 memory", 72, 17.2, is_gpu=True),
    InterruptionCause("Software bug", 54, 12.9),
    InterruptionCause("Network switch or cable", 35, 8.4),
    InterruptionCause("Host maintenance", 32, 7.6),
    InterruptionCause("GPU SRAM memory", 19, 4.5, is_gpu=True),
    InterruptionCause("GPU system processor", 17, 4.1, is_gpu=True),
    InterruptionCause("NIC", 7, 1.7),
    InterruptionCause("NCCL watchdog timeouts", 7, 1.7),
    InterruptionCause("Silent data corruption", 6, 1.4, is_gpu=True),
    InterruptionCause("GPU thermal interface and sensor", 6, 1.4, is_gpu=True),
    InterruptionCause("SSD", 3, 0.7),
    InterruptionCause("Power supply", 3, 0.7),
    InterruptionCause("Others", 10, 2.4))
LLAMA_3_ON_GPUS = 58.7  # percent of the unexpected ones, in the text: GPUs and their memory
LLAMA_3_TOTAL = 419  # unexpected interruptions, in the text and as the sum of the counts


@dataclass(frozen=True)
class ReportedRate:
    """How often a job failed. mtbf_hours: mean hours between failures. is_measured: False where the
    report extrapolates."""

    name: str
    gpus: int
    mtbf_hours: float
    is_measured: bool = True


RATES = (
    ReportedRate("Llama 3, 405B", LLAMA_3_GPUS, LLAMA_3_DAYS * HOURS_A_DAY / LLAMA_3_TOTAL),
    ReportedRate("Meta's research clusters", 1024, 7.9),
    ReportedRate("Meta's research clusters, projected", 16_384, 1.8, is_measured=False),
    # 35 manual and over 70 automatic restarts in 2 months.
    ReportedRate("OPT-175B", 992, 61 * HOURS_A_DAY / (35 + 70)))

BLOOM_SAVE = {"bytes": 2.3e12, "seconds": 40.0, "interval": 3 * 3600.0}
