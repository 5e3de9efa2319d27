# Three commands do everything on a fresh Debian 12 or Ubuntu 24.04: make demo, make test, make lab.
# They install what is missing themselves, as root or with sudo.

export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help demo lab test nightly test-lab build clean

help:
	@echo 'make demo    PostgreSQL in a virtual machine on an Ashlar RAID 5 that loses a drive'
	@echo 'make lab     the command ashlar-lab: measures Ashlar against what this machine has'
	@echo 'make test    everything that CI checks'
	@echo 'make nightly the same, and then what takes hours: longer, with other seeds, and by fuzzers'
	@echo 'make build   target/release/ashlar'
	@echo 'make clean   removes what was built, and .cache (guest, logs)'
	@echo
	@echo 'make demo takes, with their defaults:'
	@echo '  SIZE=1G       size of each drive file'
	@echo '  DRIVES="…"    six real drives instead, by path; FORCE=1 if they carry data to overwrite'
	@echo '  SCALE=        pgbench scale (20 under emulation, 50 with KVM)'
	@echo '  CLIENTS=8     pgbench clients'
	@echo '  SECONDS_=30   length of each pgbench run'
	@echo '  CPUS=2        of the virtual machine'
	@echo '  CORES=0       CPUs that the daemon polls on'
	@echo '  ASHLAR=       another ashlar binary than the one built here'
	@echo 'ASHLAR_CACHE (default .cache) is where the guest, the drive files and the logs are kept.'

demo: $(if $(ASHLAR),,build)
	@scripts/install.sh demo
	@python3 -m demo

lab: $(if $(ASHLAR),,build)
	@scripts/install.sh lab
	@echo 'as root: $(or $(ASHLAR_CACHE),.cache)/lab-venv/bin/ashlar-lab list'

test:
	@scripts/install.sh test lab
	@cargo xtask ci

nightly:
	@scripts/install.sh test lab
	@cargo xtask ci --nightly

# A step of `make test`, which has installed what it takes.
test-lab:
	@$(or $(ASHLAR_CACHE),.cache)/lab-venv/bin/python -W ignore -m unittest discover -v -t . -s lab/tests

build:
	@scripts/install.sh build
	@cargo build --release --locked -p ashlar-control

clean:
	cargo clean
	rm -rf .cache
