"""What a run's ``run.json`` says, and in what two of them differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tst_lightning.errors import UserError
from tst_lightning.phases import PhaseSchedule

FORMAT = 1
"""The format of ``run.json`` that is read here."""

_LOSS_IS_OF = (
    "data.tokenizer_sha256",
    "data.held_out_sha256",
    "data.weights",  # by which the sources of a mixture make up the loss
    "data.latent_length",
    "validation.limit_val_batches",
)
_COST_IS_OF = ("network.", "parameters", "flops_per_latent_token", "data.global_batch_size", "data.latent_length")


class Seeds(NamedTuple):
    """What one run draws at random, None where it was not set.

    Attributes:
        seed: fixes the initial weights.
        data: fixes the order of the data.
    """

    seed: int | None
    data: int | None

    def __str__(self) -> str:
        seed, data = ("none" if value is None else str(value) for value in self)
        return seed if seed == data else f"{seed} (data {data})"


class Difference(NamedTuple):
    """A setting that an arm and its baseline do not share; None where it is not recorded."""

    name: str
    arm: Any
    baseline: Any

    def __str__(self) -> str:
        return f"{self.name} {_shown(self.arm)} against {_shown(self.baseline)}"


@dataclass(frozen=True)
class Recipe:
    """Everything that was fixed before a run's first step.

    Attributes:
        version: of this package.
        schedule: the phases, in steps.
        seeds: the run's seeds.
        settings: all the rest by dotted name, such as ``optimisation.optimizer.lr``, but for the machine.
        weighting: of the places in a bag, which a run without superposition does not use.
        machine: where the run was trained; its precision is one of ``settings``.
    """

    version: str
    schedule: PhaseSchedule
    seeds: Seeds
    settings: Mapping[str, Any]
    weighting: Any
    machine: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> Recipe | None:
        """Read ``run.json``, None if the directory has none.

        Raises:
            UserError: if it is damaged, or of another format.
        """
        path = directory / "run.json"
        if not path.is_file():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise UserError(f"{path} has format {record['format']!r}, and this version reads {FORMAT}: upgrade")
            schedule = PhaseSchedule.from_dict(record["schedule"])
            machine = _together([record["machine"], *(resume["machine"] for resume in record.get("resumes", []))])
            for seed in (record["seed"], record["data"].get("seed")):
                if not isinstance(seed, int | None):
                    raise TypeError(f"seed {seed!r}")
            settings = dict(_flat({name: record[name] for name in record if name not in _NO_SETTINGS}))
            settings["machine.precision"] = machine.pop("precision", None)
            return cls(
                version=str(record["version"]),
                schedule=schedule,
                seeds=Seeds(record["seed"], settings.pop("data.seed", None)),
                settings=settings,
                weighting=settings.pop("optimisation.weighting", None),
                machine=machine,
            )
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error})") from error
        except _DAMAGE as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from error

    @property
    def is_baseline(self) -> bool:
        """Whether the run reads plain tokens from its first step to its last."""
        return all(phase.bag_size == 1 for phase in self.schedule.phases)

    @property
    def ratio(self) -> float:
        """The share of the steps in superposition phases."""
        return sum(phase.steps for phase in self.schedule.phases if phase.bag_size > 1) / self.schedule.total_steps

    @property
    def arm(self) -> str:
        """Equal for the runs that differ in nothing but their seeds, their machine and the package's version."""
        weighting = None if self.is_baseline else self.weighting
        return json.dumps([self.settings, self.schedule.to_dict(), weighting], sort_keys=True)

    def differences(self, baseline: Recipe) -> list[Difference]:
        """The settings of this recipe that ``baseline`` does not share, phases and seeds left out."""
        mine = {"total_steps": self.schedule.total_steps, **self.settings}
        other = {"total_steps": baseline.schedule.total_steps, **baseline.settings}
        if not self.is_baseline and not baseline.is_baseline:
            mine["optimisation.weighting"], other["optimisation.weighting"] = self.weighting, baseline.weighting
        return [
            Difference(name, mine.get(name), other.get(name))
            for name in dict.fromkeys([*mine, *other])
            if mine.get(name) != other.get(name)
        ]

    def loss_faults(self, other: Recipe) -> list[str]:
        """Why a nat a token here and one there would be different things; empty if they are the same."""
        values = [(name, self.settings.get(name), other.settings.get(name)) for name in _LOSS_IS_OF]
        return [
            str(Difference(*value)) if None not in value else f"{value[0]} is not recorded"
            for value in values
            if None in value or value[1] != value[2]
        ]


def same_cost_a_step(differences: list[Difference]) -> bool:
    """Whether a step takes the same FLOPs in both, given all that they differ in."""
    return not any(difference.name.startswith(_COST_IS_OF) for difference in differences)


_DAMAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_NO_SETTINGS = {"format", "version", "schedule", "seed", "machine", "resumes"}


def _together(machines: list[dict[str, Any]]) -> dict[str, Any]:
    """One description of all machines that a run was trained on, one after the other."""
    values = {name: dict.fromkeys(str(machine[name]) for machine in machines) for name in machines[0]}
    return {name: " then ".join(value) for name, value in values.items()}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 or " " in text else f"{text[:12]}..."  # of a hash, a few letters will do
