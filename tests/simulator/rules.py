"""The rules of the product that a simulation runs by. Tests replace one of them to show that the simulator notices."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from keyvault.domain.keys import KeyState, can_transition
from keyvault.domain.sources import OCCASION
from rotation.domain.pacing import count_to_begin
from rotation.domain.silence import SourceFacts
from rotation.domain.states import Facts, Move, RotationAction, Wait, next_step


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules, each as the product has it; `next_step`, `can_transition` and `count_to_begin` are its functions.

    `occasion`: a source whose uses all lie within this time was seen only once. `merge_sources`: applied to the sources
    of the key that is being retired. `requires_living_key`: a key is taken away only while the other one is usable in
    the same transaction. `dispatches_again`: the tick dispatches a rotation again when its message has no effect.
    """

    next_step: Callable[[Facts, datetime], Wait | Move | RotationAction] = next_step
    occasion: timedelta = OCCASION
    merge_sources: Callable[[tuple[SourceFacts, ...]], tuple[SourceFacts, ...]] = lambda found: found
    can_transition: Callable[[KeyState, KeyState], bool] = can_transition
    count_to_begin: Callable[..., int] = count_to_begin
    requires_living_key: bool = True
    dispatches_again: bool = True
