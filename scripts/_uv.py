"""Install by uv, which takes a fraction of pip's time. Readable by Python 3.6.

uv comes from the package index by pip, pinned in the lock. It does not read pip's settings, and a
school's machine or a company's has some: so `settings` says them in uv's words. Where one of them
has no such words, and wherever uv fails, pip installs as ever, and its log is explained.
"""

import ast
import glob
import os
import re
import subprocess

# Of a section of pip's configuration that holds for `pip install`.
SECTIONS = ("global", "install", ":env:")
# What changes nothing in what is installed, or only how pip says it.
IGNORED = {"disable-pip-version-check", "no-input", "quiet", "verbose", "no-color", "progress-bar",
           "retries", "root-user-action", "require-virtualenv", "cache-dir", "log", "exists-action",
           "no-warn-script-location", "no-python-version-warning", "prefer-binary", "config-file",
           "break-system-packages", "use-feature", "resume-retries"}


def settings(listed):
    """Return (arguments, environment) of uv for what `pip config list` prints, or None where a
    setting has no counterpart.

    A later section goes before an earlier one, as for pip: the environment before `install` before
    `global`.
    """
    found = {}
    for section in SECTIONS:
        pattern = rf"^{re.escape(section)}\.([\w.-]+)=(.*)$"
        for name, value in re.findall(pattern, listed, re.MULTILINE):
            found[name.lstrip(".")] = unquoted(value)
    arguments, environment = [], {}
    for name, value in sorted(found.items()):
        words = value.split()
        if name == "index-url":
            arguments += ["--default-index", value]
        elif name == "extra-index-url":
            # pip takes the best version of all indexes; uv by default the first index that has any.
            arguments += ["--index-strategy", "unsafe-best-match"]
            arguments += [word for url in words for word in ("--index", url)]
        elif name == "find-links":
            arguments += [word for place in words for word in ("--find-links", place)]
        elif name in ("constraint", "constraints"):
            arguments += [word for path in words for word in ("-c", path)]
        elif name == "trusted-host":
            arguments += [word for host in words for word in ("--allow-insecure-host", host)]
        elif name == "no-index":
            arguments += ["--no-index"] * is_true(value)
        elif name == "no-cache-dir":
            arguments += ["--no-cache"] * is_true(value)
        elif name in ("timeout", "default-timeout"):
            environment["UV_HTTP_TIMEOUT"] = value
        elif name == "cert":
            environment["SSL_CERT_FILE"] = value
        elif name == "proxy":
            environment.update({"HTTP_PROXY": value, "HTTPS_PROXY": value})
        elif name not in IGNORED:
            return None
    return arguments, environment


def unquoted(value):
    """Return the text of a value, which pip prints as Python would."""
    try:
        return str(ast.literal_eval(value))
    except (SyntaxError, ValueError):
        return value


def is_true(value):
    """Return whether pip reads this text as yes."""
    return value.lower() in ("y", "yes", "t", "true", "on", "1")


def pin(checkout):
    """Return the line of the lock that names uv, without its comment, or ''."""
    return next((each.requirement for each in checkout.pins()
                 if each.requirement.startswith("uv==")), "")


def is_unwanted(checkout):
    """Return whether pip installs without trying uv: by choice, or on top of another Python's
    packages, which uv does not see."""
    return os.environ.get("WORKBOOK_UV") == "0" or os.path.exists(checkout.base_python)


def is_missing(checkout):
    """Return whether `install` has to download uv first, as far as the files of .venv say."""
    pattern = os.path.join(checkout.venv, "lib", "python*", "site-packages",
                           pin(checkout).replace("==", "-") + ".dist-info")
    return bool(pin(checkout)) and not is_unwanted(checkout) and not glob.glob(pattern)


def install(checkout, lock_fd, call, arguments):
    """Install what these arguments of `pip install` name; return whether uv has done it.

    call(command, lock_fd, log, environment) runs a command.
    """
    if is_unwanted(checkout):
        return False
    found = settings_of(checkout)
    if found is None or not has_uv(checkout, lock_fd, call):
        return False
    options, environment = found
    # As pip does: with the certificates that the system trusts, and compiled. Where Python may not
    # write bytecode, as in many a container, each process would compile torch and transformers
    # again: 9.8 s to import them in place of 4.4.
    environment = dict(os.environ, UV_SYSTEM_CERTS="1", UV_NO_CONFIG="1", UV_COMPILE_BYTECODE="1",
                       **environment)
    command = [checkout.python, "-P", "-m", "uv", "pip", "install", "--python", checkout.python]
    open(unfinished(checkout), "w").close()
    if call(command + options + list(arguments), lock_fd, checkout.log, environment):
        return False
    os.remove(unfinished(checkout))
    return True


def unfinished(checkout):
    """Return the path of the file that is there while uv installs, and after it was stopped."""
    return os.path.join(checkout.venv, "setup.uv")


def settings_of(checkout):
    """Return what `settings` says of the pip in .venv, None where it cannot be asked."""
    try:
        listed = subprocess.check_output([checkout.python, "-P", "-m", "pip", "config", "list"],
                                         stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return settings(listed.decode(errors="replace"))


def has_uv(checkout, lock_fd, call):
    """Return whether .venv has the lock's uv, and let pip install it if it has not."""
    wanted = pin(checkout)
    if not wanted:
        return False
    try:
        said = subprocess.check_output([checkout.python, "-P", "-m", "uv", "--version"],
                                       stderr=subprocess.DEVNULL).decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        said = ""
    if said.split()[1:2] == [wanted[len("uv=="):]]:
        return True
    command = [checkout.python, "-P", "-m", "pip", "install", "--disable-pip-version-check"]
    return call(command + ["--quiet", wanted], lock_fd, checkout.log, None) == 0
