"""Submissions that would harm the machine or others on it, and what must come of each: the words
that are said of it, or those of a limit that it met."""

import os

from on_the_check import DOES_NOT_HELP, HEAD, combine, on_ranks

# The programs that detach sleep for so many seconds: nobody else's do.
SECONDS = f"1234567{os.getpid()}"
# A program started without a word that Python's audit hooks would hear.
_START = ("fork = LOADED['_posix' + 'subprocess'].fork_exec",
          "err = os.pipe()",
          "args = [[b'/bin/sh', b'-c', TEXT], [b'/bin/sh'], True, (err[1],), None, None, -1, -1, "
          "-1, -1, -1, -1, *err, False, True, -1, None, None, None, -1, None, False]",
          "fork(*args)", "import time; time.sleep(0.3)")


def start(shell: str) -> str:
    """Starts a shell behind the audit hook's back."""
    return combine(*_START, head=f"{HEAD}TEXT = {shell.encode()!r}\n")


ATTACKS = {
    "forks": (combine("while True: getattr(os, 'fo' + 'rk')()"), "forks the process of the check"),
    "fork_bomb": (start("bomb() { bomb | bomb & }; bomb; sleep 60"),
                  f"{DOES_NOT_HELP}|ended before"),
    "daemon": (start(f"setsid sleep {SECONDS} & setsid sleep {SECONDS}"),
               DOES_NOT_HELP),
    "daemon_on_ranks": (on_ranks(*_START).replace("TEXT]", f"b'setsid sleep {SECONDS}']"),
                        "returned its own tensor"),
    "starts_a_program": (combine("LOADED['subprocess'].run(['id'])"), DOES_NOT_HELP),
    "kills_its_parent": (combine("getattr(os, 'ki' + 'll')(os.getppid(), 9)"),
                         "ended before the check said"),
    "kills_its_process_group": (start("kill -9 0"), f"ended before the check said|{DOES_NOT_HELP}"),
    "kills_all_by_a_program": (start("kill -9 -1"), "ended before the check said"),
    "leaves_at_once": (combine("getattr(os, '_ex' + 'it')(0)"), "ended before the check said"),
    "endless_loop": (combine("while True: pass"), "not done after"),
    "fills_the_disk": (combine("with open('big', 'wb') as file:",
                               "    while True: file.write(bytes(10**7))"), "File too large|space"),
    "makes_files": (combine("for n in range(10**6): open(f'f{n}', 'w').close()"),
                    "No space left|Too many"),
    "fills_the_output": (combine("while True: print('x' * 1000)"), "printed more than"),
    "fills_the_output_of_ranks": (on_ranks("for _ in range(30000): print('x' * 1000)"),
                                  "returned its own tensor"),
    "spoils_the_log": (combine("os.lseek(1, 2 * 10**8, 0); os.write(1, b'x')",
                               "os.lseek(2, 2 * 10**8, 0); os.write(2, b'x')"),
                       "full batch|plain|gradient"),
    "fills_the_memory": (combine("held = []", "while True: held.append(bytearray(4 * 10**9))"),
                         "MemoryError|ended before the check said"),
    "opens_files": (combine("held = [open('/dev/null') for _ in range(10**5)]"),
                    "Too many open files"),
    "opens_a_socket": (combine("LOADED['socket'].create_connection(('192.0.2.1', 53), 2)"),
                       "opens a socket"),
    "listens": (combine("s = LOADED['socket'].socket()", "s.bind(('0.0.0.0', 4444))"),
                "opens a socket"),
    "reaches_out_by_a_program": (start("bash -c 'exec 3<>/dev/tcp/192.0.2.1/53'; sleep 9"),
                                 DOES_NOT_HELP),
    "writes_into_labs": (combine("open(LOADED['labs'].__file__, 'a').write('x')"),
                         "Read-only|Permission"),
    "removes_files": (combine("os.remove('/usr/bin/env')"), "Read-only|Permission"),
    "lists_home": (combine("os.listdir('/root')"), DOES_NOT_HELP),
    "reads_another_process": (combine("open('/pr' + 'oc/1/mem', 'rb').read(10)"),
                              "opens /proc/1/mem"),
    "reads_the_graders_environment": (combine("open('/pr' + 'oc/1/environ').read()"),
                                      "Permission|" + DOES_NOT_HELP),
    "loads_compiled_code": (combine("open('x.so', 'wb').write(b'')"), "uses compiled code"),
}
