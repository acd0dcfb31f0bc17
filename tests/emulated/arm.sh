#!/bin/bash
# The tests named as arguments, on an emulated ARM processor (QEMU's user mode), beside a Linux and a torch for ARM, on Debian or Ubuntu, as root:
#   tests/emulated/arm.sh /tmp/arm tests/mx/test_kernels.py
# The first argument is a folder for it all (2 GB; some minutes the first time; delete with `umount FOLDER/root/{proc,dev,repo}` first).
# It shows that results are right. Times there mean nothing, and neither does the order in which threads see each other's writes.
set -e
place=$1 && shift
repo=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$place"/{apt/lists/partial,archives/partial,qemu,root/proc,root/dev,root/repo,root/tmp,root/site,root/etc}

if [ ! -e "$place/ready" ]; then
    (cd "$place/qemu" && apt-get download qemu-user-static && dpkg -x qemu-user-static*.deb .)
    : > "$place/status"
    apt_arm() {
        apt-get -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$place/apt" -o Dir::State::status="$place/status" \
            -o Dir::Cache="$place" -o APT::Install-Recommends=false -o Debug::NoLocking=true -o APT::Sandbox::User=root "$@"
    }
    apt_arm update
    apt_arm install -y --download-only python3 python3-dev gcc g++ libc6-dev libgomp1 bash dash coreutils
    for package in "$place"/archives/*.deb; do dpkg -x "$package" "$place/root"; done
    ln -sf dash "$place/root/bin/sh"
    cp /etc/passwd /etc/group "$place/root/etc/"
    python=$(basename "$(ls "$place"/root/usr/bin/python3.* | grep -E '3\.[0-9]+$')")
    # By name and without what they ask for: pip would take that for this machine's own processor.
    needed='accelerate|annotated-doc|anyio|certifi|click|execnet|filelock|fsspec|gguf|h11|hf-xet|httpcore2|httpx2|huggingface_hub|idna|iniconfig|Jinja2
        |markdown-it-py|MarkupSafe|mdurl|ml_dtypes|mpmath|networkx|numpy|packaging|pluggy|psutil|Pygments|pytest|PyYAML|regex|requests|rich|safetensors
        |scipy|sentencepiece|shellingham|sniffio|sympy|tokenizers|tqdm|transformers|truststore|typer|typing_extensions|urllib3'
    # torch 2.8: the last one for ARM that comes without CUDA's libraries
    python3 -m pip install --no-compile --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 --platform manylinux_2_26_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --platform any --implementation cp --python-version "${python#python}" \
        --target "$place/root/site" torch==2.8.0 $(grep -E "^(${needed//[[:space:]]/})==" "$repo/constraints.txt")
    touch "$place/ready"
fi

[ -e /proc/sys/fs/binfmt_misc/register ] || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || echo ":qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:$place/qemu/usr/bin/qemu-aarch64-static:F" > /proc/sys/fs/binfmt_misc/register
mountpoint -q "$place/root/proc" || mount -t proc proc "$place/root/proc"
mountpoint -q "$place/root/dev" || mount --bind /dev "$place/root/dev"
mountpoint -q "$place/root/repo" || mount --bind "$repo" "$place/root/repo"
chroot "$place/root" bash -c 'cd /repo && export HOME=/tmp PYTHONPATH=/site:/repo/src PYTHONDONTWRITEBYTECODE=1 HF_SPECDEC_CACHE=/tmp/cache HF_HUB_OFFLINE=1 \
    OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false && exec python3 -m pytest -q -p no:cacheprovider "$@"' bash "$@"
