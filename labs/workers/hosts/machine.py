"""The first process inside the namespaces: builds hosts, switch and cables, prints `ready`, and
waits until its caller says so, exits or is killed. When it ends, the kernel ends every
process below it and removes the namespaces with all that is in them.

`labs.workers.hosts.namespaces` starts it as a script under `unshare`, with a description in JSON.
It imports nothing but the standard library, so that it starts in milliseconds.

    host 0: eth0 ──────── port0 ┐
                                ├ switch, in the network namespace of this process
    host 1: eth0 ──────── port1 ┘

A host is one process, the first of its own network, pid, mount and host name namespaces. Whatever
runs on the host is below it in the pid namespace and dies with it.
"""

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

RELAY = Path(__file__).with_name("relay.py")
PRIVATE = Path("/run")  # here a tmpfs, which no process outside sees
# Jumbo frames, as clusters use them: headers are then 0.7 % of the bytes, not 5 %.
MTU = "9000"
# Without a network, each question to a name server would wait for 10 seconds.
NSSWITCH = "hosts: files\npasswd: files\ngroup: files\n"


def main() -> None:
    """Is the machine or one of its hosts, as the argument says."""
    described = json.loads(sys.argv[1])
    try:
        if "name" in described:
            be_a_host(described)
        else:
            be_the_machine(described)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]}: {error.stderr.strip()}")


def be_the_machine(described: dict) -> None:
    """The parent of all hosts. described: their addresses, what `tc` does to what a host or a port
    sends (bucket, port_bucket), the delay in seconds, and the file descriptor that tells when the
    caller has ended."""
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(PRIVATE))
    replace_name_lookup(described["addresses"])
    without_ipv6()
    delay, rate = described["delay"], described["port_rate"]
    with_netem = bool(delay) and has_netem()
    batch("ip", "link set lo up", "link add switch type bridge mcast_snooping 0",
          "link set switch up")
    # At the ports, so that tbf and netem are never one inside the other.
    shape = netem(delay, rate) if with_netem else described["port_bucket"]
    hosts = [start_host(index, address, described["bucket"])
             for index, address in enumerate(described["addresses"])]
    for index, host in enumerate(hosts):
        connect(index, host, shape, on_bridge=not delay or with_netem)
    for host in hosts:
        wait_for(host, "ready")
    if delay and not with_netem:
        start_relay(delay, len(hosts))
    print("ready", flush=True)
    # The pipe alone does not tell of a caller that was killed: a child that it forked may have
    # kept the other end.
    select.select([sys.stdin, described["caller"]], [], [])


def start_host(index: int, address: str, shape: str) -> subprocess.Popen:
    described = json.dumps({"name": f"host{index}", "address": address, "shape": shape})
    return subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
         sys.executable, "-I", "-S", __file__, described],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def has_netem() -> bool:
    """Whether the kernel can delay frames. Many cannot: those of Fedora and of small machines."""
    with contextlib.suppress(subprocess.CalledProcessError):
        batch("tc", "qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root")
        return True
    return False


def netem(delay: float, bits_per_second: float | None) -> str:
    """The arguments of `tc` for what a port sends to its host; a large limit, so that no frame in
    flight is dropped."""
    rate = f" rate {bits_per_second:.0f}bit" if bits_per_second else ""
    return f"netem delay {delay * 1e6:.0f}us{rate} limit 100000"


def start_relay(delay: float, number: int) -> None:
    """Starts the process that is the switch where the kernel cannot delay frames."""
    relay = subprocess.Popen([sys.executable, "-I", "-S", str(RELAY), str(delay),
                              *(f"port{index}" for index in range(number))],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(relay, "ready")


def connect(index: int, host: subprocess.Popen, shape: str, on_bridge: bool) -> None:
    """Lays the cable from a host to the switch, and lets the host continue."""
    wait_for(host, "started")
    port = f"port{index}"
    batch("ip", f"link add {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {host.pid}",
          f"link set {port} {'master switch' if on_bridge else ''} up")
    if shape:
        batch("tc", f"qdisc add dev {port} root {shape}")
    host.stdin.write("connected\n")
    host.stdin.flush()


def wait_for(child: subprocess.Popen, word: str) -> None:
    """Waits for a line of a child that sets something up."""
    if child.stdout.readline().strip() != word:
        raise subprocess.CalledProcessError(1, [child.args[0]], stderr=child.stderr.read())


def be_a_host(described: dict) -> None:
    """The first process of a host: sets up its end of the cable, and then only reaps orphans."""
    socket.sethostname(described["name"])
    without_ipv6()
    # /sys/class/net then shows the host's own link. A container may forbid it.
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], capture_output=True)
    print("started", flush=True)
    sys.stdin.readline()
    batch("ip", "link set lo up", f"address add {described['address']}/24 dev eth0",
          "link set eth0 up")
    if described["shape"]:
        batch("tc", f"qdisc add dev eth0 root {described['shape']}")
    # Nobody else waits for processes whose parent has ended: they would stay as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        signal.pause()


def replace_name_lookup(addresses: list[str]) -> None:
    """Lets the hosts know each other, and no other name."""
    names = [f"{address} host{index}" for index, address in enumerate(addresses)]
    hosts = "\n".join(["127.0.0.1 localhost", *names, ""])
    for name, text in {"hosts": hosts, "nsswitch.conf": NSSWITCH}.items():
        if Path("/etc", name).exists():
            (PRIVATE / name).write_text(text)
            run("mount", "--bind", str(PRIVATE / name), f"/etc/{name}")


def without_ipv6() -> None:
    """Its neighbour discovery would add bytes to the counters, now and then."""
    for which in ("all", "default"):
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")


def batch(program: str, *lines: str) -> None:
    """Runs several commands of `ip` or `tc` in one process."""
    run(program, "-batch", "-", text="\n".join(lines))


def run(*command: str, text: str = "") -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, input=text)


if __name__ == "__main__":
    main()
