#!/bin/sh
# The first process of the virtual machine of vm.py: it lays a throw-away layer over the host's files,
# runs /job there and powers off. Only busybox is here. Messages go to the console, which is a log.
export PATH=/bin
/bin/busybox --install -s /bin

fail() {
    echo "init: $1"
    poweroff -f
}

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do
    insmod "/modules/$module" || fail "cannot load $module"
done </modules/order

mkdir /host /layer /root
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose host /host || fail "no 9p"
mount -t tmpfs -o size=80% layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work overlay /root ||
    fail "no overlay"

for folder in proc sys dev; do
    mount --bind /$folder /root/$folder
done
mount -t tmpfs run /root/run
cd /root/dev || fail "no /dev"
ln -s /proc/self/fd fd
ln -s fd/0 stdin
ln -s fd/1 stdout
ln -s fd/2 stderr
mkdir pts shm hugepages
mount -t devpts -o ptmxmode=666 pts pts
mount -t tmpfs -o mode=1777 shm shm
mount -t hugetlbfs huge hugepages
cd /root/sys/fs/cgroup || fail "no cgroups"
mount -t cgroup2 cgroup .
echo "+memory +cpuset" >/root/sys/fs/cgroup/cgroup.subtree_control ||
    fail "no memory or cpuset controller"
cd /

# The ports of the virtual serial device are told apart by the names that vm.py gave them.
for port in /sys/class/virtio-ports/*; do
    case $(cat "$port/name") in
    output) output=/dev/${port##*/} ;;
    status) status=/dev/${port##*/} ;;
    esac
done
cp /job /root/run/job
chroot /root /bin/sh /run/job </dev/null >"$output" 2>&1
echo $? >"$status"
poweroff -f
