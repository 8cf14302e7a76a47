"""The last that the fork server imports: tells the janitor that all is there."""

from labs.workers import janitor

janitor.all_is_imported()
