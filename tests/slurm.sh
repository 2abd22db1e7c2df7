#!/usr/bin/env bash
# A real Slurm of one node on this machine, for as long as one command takes:
#
#     apt-get install -y slurm-wlm munge
#     tests/slurm.sh                      # python -m pytest -m slurm
#     tests/slurm.sh sinfo                # or any other command
#
# It needs root and no systemd, so a container will do. All it writes is in a temporary folder, and
# whatever happens the daemons are stopped and the folder is removed. PYTHON names another python.
set -euo pipefail
cd "$(dirname "$0")/.."

PATH=$PATH:/usr/sbin:/sbin
for tool in munged slurmctld slurmd sbatch srun squeue; do
  command -v "$tool" >/dev/null ||
    { echo "$tool is not there: apt-get install -y slurm-wlm munge" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "slurmd starts the jobs of a user as root: run this as root" >&2; exit 1; }

dir=$(mktemp -d)
chmod 755 "$dir"
clean_up() {
  scancel --me --signal=KILL 2>/dev/null || true
  for daemon in slurmd slurmctld munged; do
    [ ! -s "$dir/$daemon.pid" ] || kill "$(cat "$dir/$daemon.pid")" 2>/dev/null || true
  done
  for daemon in slurmd slurmctld munged; do # each removes its file as it ends
    for _ in $(seq 50); do [ -s "$dir/$daemon.pid" ] || break; sleep 0.1; done
  done
  rm -rf "$dir"
}
no_slurm() {
  tail -n 20 "$dir"/*.log >&2
  echo "$1" >&2
  exit 1
}
trap clean_up EXIT
trap 'exit 130' INT TERM

host=$(hostname -s)
memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
mkdir "$dir/state" "$dir/spool"
export SLURM_CONF=$dir/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_min_interval=0
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$memory State=UNKNOWN
PartitionName=test Nodes=$host Default=YES State=UP
CONF
# A container may not make cgroups. Slurm before 23 cannot say "disabled"; v1 then touches none.
version=$(slurmd -V | grep -o '[0-9]*' | head -n 1)
echo "CgroupPlugin=$([ "$version" -lt 23 ] && echo cgroup/v1 || echo disabled)" >"$dir/cgroup.conf"

(umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
munged --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
  --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" --num-threads=2
slurmctld || no_slurm "slurmctld did not start"
slurmd || no_slurm "slurmd did not start"

for _ in $(seq 100); do
  [ "$(sinfo --noheader --format=%t 2>/dev/null)" != idle ] || break
  sleep 0.2
done
[ "$(sinfo --noheader --format=%t 2>/dev/null)" = idle ] || no_slurm "the node is not idle"

[ $# -gt 0 ] || set -- "${PYTHON:-python}" -m pytest -m slurm
"$@"
