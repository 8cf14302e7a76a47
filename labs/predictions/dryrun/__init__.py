"""One process that dry-runs any training job on any number of ranks: exact bytes and traffic of one
rank, without a number being computed and without a second process."""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.predictions.dryrun.result import Collective, DryRun
    from labs.predictions.dryrun.run import dry_run

__all__, __getattr__, __dir__ = lazy_exports(__name__)
