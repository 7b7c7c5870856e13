#!/bin/sh
# Installs moe-hot, or removes what it has installed. Bad input ends with one line and exit code 2.
set -eu
umask 022

refuse() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 2
}

usage() {
    cat <<END
Usage: install.sh [FOLDER]               install moe-hot into FOLDER/bin, FOLDER/lib and FOLDER/share
       install.sh --uninstall [FOLDER]   remove it again
FOLDER is /usr/local for root, else ~/.local, unless given.
END
}

# What was installed, and the folders that were made for it (with a slash at their end), below the prefix; ./ is the prefix.
LIST=share/doc/moe-hot/installed

uninstall() {
    while IFS= read -r name; do
        case $name in
        */) ;;
        *) rm -f "$prefix/$name" || refuse "$prefix/$name: cannot be removed" ;;
        esac
    done <"$prefix/$LIST"
    # Inner folders first; those that hold anything else stay.
    folders=$(grep '/$' "$prefix/$LIST" | LC_ALL=C sort -r) || true
    rm -f "$prefix/$LIST" || refuse "$prefix/$LIST: cannot be removed"
    for folder in $folders; do rmdir "$prefix/${folder#./}" 2>/dev/null || true; done
}

# Compares the package with its checksums: each file, and that there are no others.
check_package() {
    [ -f SHA256SUMS ] || refuse "$here/SHA256SUMS is missing; expected the package as it was unpacked"
    bad=$(sha256sum --check --strict --quiet SHA256SUMS 2>/dev/null | head -n 1) || true
    [ -z "$bad" ] || refuse "$here/${bad%%: *} is damaged or missing; expected the package as it was published"
    sha256sum --check --strict --status SHA256SUMS 2>/dev/null ||
        refuse "$here/SHA256SUMS is damaged; expected the package as it was published"
    [ "$(find . -type f ! -path ./SHA256SUMS | LC_ALL=C sort)" = "$(sed 's|^[0-9a-f]*  |./|' SHA256SUMS)" ] ||
        refuse "$here: it does not hold the files that SHA256SUMS names, and no others; expected the package as it was published"
    bin/moe-hot --version >/dev/null 2>&1 ||
        refuse "$here/bin/moe-hot does not run here; expected Linux on x86-64, and the glibc that share/doc/moe-hot/README.md names"
}

# Below the prefix: its folders that are not there yet, outer ones first.
missing_folders() {
    find bin lib share -type d | LC_ALL=C sort | while IFS= read -r folder; do
        [ -d "$prefix/$folder" ] || printf '%s/\n' "$folder"
    done
}

install_files() {
    find bin lib share -type f | LC_ALL=C sort | while IFS= read -r file; do
        mode=644
        [ ! -x "$file" ] || mode=755
        # The old file is not written to: a program that has it loaded goes on with it.
        if ! { mkdir -p "$(dirname "$prefix/$file")" && install -m "$mode" "$file" "$prefix/$file"; } 2>/dev/null; then
            refuse "$prefix/$file: cannot be written; expected a folder that you may write to"
        fi
    done
}

# First of all, so that whatever is installed can be removed again.
write_list() {
    made=
    [ -d "$prefix" ] || made=./
    folders=$(missing_folders)
    if ! {
        mkdir -p "$(dirname "$prefix/$LIST")" &&
            { find bin lib share -type f && printf '%s\n' "$folders" "$made"; } | sed '/^$/d' | LC_ALL=C sort >"$prefix/$LIST"
    } 2>/dev/null; then
        refuse "$prefix: cannot be written to; expected a folder that you may write to"
    fi
}

remove=
case ${1-} in
-h | --help)
    usage
    exit
    ;;
--uninstall)
    remove=1
    shift
    ;;
-*) refuse "$1: no such option; expected a folder or --uninstall" ;;
esac
[ $# -le 1 ] || refuse "$2: expected one folder"

if [ $# = 1 ]; then
    prefix=$1
elif [ "$(id -u)" = 0 ]; then
    prefix=/usr/local
else
    [ -n "${HOME-}" ] || refuse "HOME is not set; expected the name of a folder"
    prefix=$HOME/.local
fi
[ -n "$prefix" ] || refuse "expected the name of a folder"
case $prefix in
/*) ;;
*) prefix=$PWD/$prefix ;;
esac
[ "$prefix" = / ] || prefix=${prefix%/}

if [ -n "$remove" ]; then
    [ -f "$prefix/$LIST" ] || refuse "$prefix: moe-hot was not installed there by install.sh"
    uninstall
    echo "moe-hot is removed from $prefix"
    exit
fi

here=$(cd "$(dirname "$0")" && pwd)
cd "$here"
check_package
[ ! -f "$prefix/$LIST" ] || uninstall
write_list
install_files
echo "$(bin/moe-hot --version | head -n 1) is installed; the command is $prefix/bin/moe-hot"
case :$PATH: in
*":$prefix/bin:"*) ;;
*) echo "$prefix/bin is not in PATH: add it, or type the whole name" ;;
esac
