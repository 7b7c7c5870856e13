"""File systems that cannot do everything: command lines that have a program meet one.

`FAULTS_C` is a library to be preloaded; its variables name the error (a number) that a call gives. `FORBID` is a script that
starts a program for which the system refuses hard links, and renames that may replace nothing.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import HANG_S

FAULTS_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int fault(const char * name) {
    const char * value = getenv(name);
    return value ? (errno = atoi(value)) : 0;
}

#define REAL(name, type) ((type) dlsym(RTLD_NEXT, #name))

int fsync(int fd) {
    struct stat st;
    int is_folder = fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
    return fault(is_folder ? "FAIL_FSYNC_FOLDER" : "FAIL_FSYNC") ? -1 : REAL(fsync, int (*)(int))(fd);
}

int flock(int fd, int how) {
    return fault("FAIL_FLOCK") ? -1 : REAL(flock, int (*)(int, int))(fd, how);
}

int rename(const char * from, const char * to) {
    return fault("FAIL_RENAME") ? -1 : REAL(rename, int (*)(const char *, const char *))(from, to);
}

/* FAIL_WRITE, as long as the file FAIL_WHILE is there, for what lies in its folder */
ssize_t write(int fd, const void * bytes, size_t n) {
    const char * flag = getenv("FAIL_WHILE");
    if (flag && access(flag, F_OK) == 0) {
        char link[64], path[4096];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        size_t folder = strrchr(flag, '/') - flag + 1;
        if (length > 0 && strncmp(path, flag, folder) == 0 && fault("FAIL_WRITE")) {
            return -1;
        }
    }
    return REAL(write, ssize_t (*)(int, const void *, size_t))(fd, bytes, n);
}
"""

# link, linkat: EPERM; renameat2 with flags: EINVAL (x86-64)
FORBID = f"""
import ctypes, os, struct, sys
ins = lambda code, yes, no, value: struct.pack("HBBI", code, yes, no, value)
load, equal, give = 0x20, 0x15, 6
program = b"".join([
    ins(load, 0, 0, 0), ins(equal, 4, 0, 86), ins(equal, 3, 0, 265), ins(equal, 0, 3, 316), ins(load, 0, 0, 48),
    ins(equal, 1, 2, 0), ins(give, 0, 0, 0x50000 | {errno.EPERM}), ins(give, 0, 0, 0x7FFF0000),
    ins(give, 0, 0, 0x50000 | {errno.EINVAL})])
code = ctypes.create_string_buffer(program, len(program))
filter = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""

FORBIDDING_LINKS = [sys.executable, "-c", FORBID]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


def faults_library(folder: Path) -> Path:
    source, library = folder / "faults.c", folder / "libfaults.so"
    source.write_text(FAULTS_C)
    command = ["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run([str(word) for word in command], check=True, timeout=HANG_S)
    return library


def with_file_mounted(file: Path, at: Path) -> list:
    """As `docker run -v FILE:AT` does it."""
    return ["unshare", "-m", "bash", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', file, at]


def with_shell(before: str) -> list:
    """In a shell that first does something, to its own descriptors and limits say."""
    return ["bash", "-c", f'{before}; exec "$@"', "bash"]


WITHOUT_PRIVILEGES = [
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search,-fowner",
    "--inh-caps=-dac_override,-dac_read_search,-fowner",
]
