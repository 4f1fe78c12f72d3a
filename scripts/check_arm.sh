#!/bin/sh
# Compile the kernels and tests/native/check.cpp for ARM and for this machine, and run them; those for ARM
# by qemu, where this machine is none. Flags are those of CMakeLists.txt. Needs no Python.
set -eu
cd "$(dirname "$0")/.."
native=src/calipers/kernels/native/cpp
build=build/arm
mkdir -p $build

kernel_flags=$(sed -n '/^set(KERNEL_FLAGS/,/)/p' $native/CMakeLists.txt | grep -oE ' -[A-Za-z0-9=-]+')
flags_of() { sed -n "s/^ *add_kernels($1\([^)]*\)).*/\1/p" $native/CMakeLists.txt; }

# compile COMPILER INSTRUCTION_SET
compile() {
    compile="$1 -std=c++17 -I$native -DCALIPERS_ISA=$2 -Wall -Wextra -pthread"
    $compile $kernel_flags $(flags_of "$2") -c $native/kernels.cpp -o $build/kernels-"$2".o
    $compile -O3 tests/native/check.cpp $native/parallel.cpp $native/sweep.cpp $build/kernels-"$2".o -o $build/check-"$2"
}

install_tools() {
    if command -v aarch64-linux-gnu-g++ && { command -v qemu-aarch64 || command -v qemu-aarch64-static; }; then return; fi
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user) || {
        echo "make check-arm needs aarch64-linux-gnu-g++ and qemu-aarch64, and cannot install them." \
            "Install the packages g++-aarch64-linux-gnu and qemu-user of Debian or Ubuntu." >&2
        exit 1
    }
}

has() { for flag; do grep -qw "$flag" /proc/cpuinfo || return 1; done; }

if [ "$(uname -m)" = aarch64 ]; then
    compile "${CXX:-g++}" neon
    $build/check-neon
    exit
fi
install_tools >/dev/null
compile aarch64-linux-gnu-g++ neon
"$(command -v qemu-aarch64 || command -v qemu-aarch64-static)" -L /usr/aarch64-linux-gnu $build/check-neon
compile "${CXX:-g++}" generic
$build/check-generic
if has avx2 fma f16c; then
    compile "${CXX:-g++}" avx2
    $build/check-avx2
fi
if has avx2 fma f16c avx512f avx512dq avx512bw avx512vl; then
    compile "${CXX:-g++}" avx512
    $build/check-avx512
fi
