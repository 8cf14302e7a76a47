"""Several hosts on one machine: `network` is what a student calls, `namespaces` starts and enters
what they are made of, and `machine` is the process that builds it there; `links` shapes and counts,
`jobs` runs commands on the hosts, and `torchrun` fills in what differs by host."""

from typing import TYPE_CHECKING

from labs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from labs.workers.hosts.jobs import HostsJob, JobFailed, JobResult
    from labs.workers.hosts.links import LinkBytes, link_bytes, set_bandwidth
    from labs.workers.hosts.namespaces import HostsUnavailable
    from labs.workers.hosts.network import hosts, hosts_unavailable

__all__, __getattr__, __dir__ = lazy_exports(__name__)
