# MortarMQ. `make test` is everything CI runs, `make check` the inner loop, `make run` a broker on loopback.
#
# The io_uring backend is behind a build tag, and the library it uses links only with -checklinkname=0; both travel in
# GOFLAGS so that every go command below, and those that tests start, build the same thing.
SHELL := /bin/bash
PLAIN_GOFLAGS := $(GOFLAGS)
export GOFLAGS := $(strip $(GOFLAGS) -tags=uring -ldflags=-checklinkname=0)

BIN := bin
TOOLS := .bin
GOLANGCI_VERSION := v2.15.0
GOLANGCI := $(TOOLS)/golangci-lint-$(GOLANGCI_VERSION)

FUZZTIME ?= 2s
TEST_TIMEOUT := 20m
ARGS ?=

.PHONY: all build build-race build-plain run check test lint unit unit-plain race fuzz integration crash soak sim sim-long sim-mutants model-long bench bench-groups bench-mixed bench-peers bench-peers-test bench-compare tidy clean help

all: build

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

build: ## mortard and mortarmq, with io_uring
	@mkdir -p $(BIN)
	go build -o $(BIN)/ ./cmd/...

# The same with the race detector, for tests that start brokers.
build-race:
	@mkdir -p $(BIN)/race
	go build -race -o $(BIN)/race/ ./cmd/mortard

build-plain: ## everything again as plain `go build` sees it (no io_uring)
	GOFLAGS='$(PLAIN_GOFLAGS)' go build ./...
	GOFLAGS='$(PLAIN_GOFLAGS)' go vet ./...

run: build ## a broker on 127.0.0.1:7188 with its data in ./data
	./$(BIN)/mortard $(ARGS)

check: build build-plain lint unit ## build, lint, unit tests

test: build build-plain lint unit unit-plain race fuzz sim crash ## everything, as CI runs it
	@echo "make test: everything passed"

$(GOLANGCI):
	@mkdir -p $(TOOLS)
	GOFLAGS= GOBIN=$(CURDIR)/$(TOOLS) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	@mv $(TOOLS)/golangci-lint $@

lint: $(GOLANGCI) ## gofmt, vet, golangci-lint, module tidiness
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "not gofmt'ed: $$out"; exit 1; fi
	go vet ./...
	GOFLAGS='$(PLAIN_GOFLAGS)' $(GOLANGCI) run --build-tags=uring ./...
	go mod tidy -diff

# Tests that start mortard processes live under tests/ and run in `crash`.
UNIT = $$(go list ./... | grep -v /tests/)

# Tests that need programs take those that were just built.
unit race crash: export MORTARMQ_TEST_BINARIES = $(CURDIR)/$(BIN)

# Tests that run beside each other spend their time waiting: for leases, elections, retries.
PARALLEL := -parallel 8

unit: build ## unit tests
	go test $(PARALLEL) -timeout $(TEST_TIMEOUT) $(UNIT)

# The build tag decides about package ring only, and so about those that do their disk operations with its backends.
unit-plain: ## unit tests of what differs without io_uring
	GOFLAGS='$(PLAIN_GOFLAGS)' go test $(PARALLEL) ./ring/... ./engine ./cmd/...

race: build ## unit tests under the race detector
	go test $(PARALLEL) -race -short -timeout $(TEST_TIMEOUT) $(UNIT)

fuzz: ## every fuzz target for FUZZTIME (2s)
	tools/fuzz $(FUZZTIME)

crash: build build-race ## real mortard processes, built with the race detector too: kill -9, restarts, damaged data, frozen members
	go test $(PARALLEL) -p 3 -count=1 -timeout 10m ./tests/...
	go test $(PARALLEL) -p 3 -race -count=1 -short -timeout 10m ./tests/...

soak: ## leaders killed 30 times (figures in bin/failover.json), crash rounds and groups under stress with ever new seeds: make soak [DURATION=30m] [SEED=n] [ARGS='--race --only groups']
	@mkdir -p $(BIN)
	go run ./tests/crash/cmd/soak --duration $(or $(DURATION),10m) --report $(BIN)/failover.json $(ARGS)

SIM := go run ./sim/cmd/sim

sim: ## clusters in simulated time, 2 000 seeds; fails if a fault or situation that matters occurred too rarely
	$(SIM) --seeds 2000

sim-long: model-long ## model-long, then as many seeds of clusters as wanted: make sim-long SEEDS=200000 [FIRST=n] [ARGS='--workers 4']
	$(SIM) --seeds $(or $(SEEDS),20000) --first $(or $(FIRST),1) $(ARGS)

sim-mutants: ## deliberate faults in the broker, each of which the simulators have to find
	go test -tags=uring,mutants -count=1 -timeout 0 -v -run Mutants ./engine/replica ./wal
	go run -tags=uring,mutants ./sim/cmd/sim --mutants --seeds 2000 $(ARGS)

model-long: ## model tests of 10 000 steps a seed: make model-long [MODEL_SEEDS=5000] [FIRST=n]
	go test -count=1 -timeout 0 -run Model ./engine/group -args -steps 10000 -seeds $(or $(MODEL_SEEDS),1000) -first $(or $(FIRST),0)
	go test -count=1 -timeout 0 -run RandomRuns ./engine/ledger -args -model.steps 10000 -model.seeds $(or $(MODEL_SEEDS),1000) -model.first $(or $(FIRST),0)
	go test -count=1 -timeout 0 -run Letters_RandomLives ./engine/coord -args -letters.steps 10000 -letters.seeds $(or $(MODEL_SEEDS),1000) -letters.first $(or $(FIRST),0)

BENCH := go run ./bench/cmd/mortarbench --mortard ./$(BIN)/mortard

bench: build ## throughput and latency, beside the machine's limits and other brokers: make bench [PEERS=nats,redis] [PROFILE=1] [ARGS='--quick']
	$(BENCH) $(if $(PEERS),--peers $(PEERS)) $(if $(PROFILE),--profile) $(ARGS)

bench-mixed: build ## an hour with slow consumers, retries and failovers, as charts: make bench-mixed [DURATION=10m] [ARGS='--rate 10000']
	$(BENCH) --workloads mixed --rounds 1 --mixed-duration $(or $(DURATION),1h) $(ARGS)

bench-groups: build ## what a rebalance, members and groups cost: make bench-groups [ARGS='--rounds 5 rebalance']
	go run ./bench/cmd/groupbench --mortard ./$(BIN)/mortard $(ARGS)

bench-peers: ## install the brokers to compare with: make bench-peers [PEERS='nats redis'] (Debian packages take root)
	bench/peers/install.sh $(PEERS)

bench-peers-test: ## the drivers against the real servers that are installed
	MORTARMQ_PEER_TESTS=1 go test -count=1 -timeout 15m -v -run Real ./bench/peers

bench-compare: ## is this tree slower than a commit? make bench-compare [BASE=ref] [ARGS='--count 20']
	go run ./bench/cmd/benchcompare --base $(or $(BASE),HEAD) $(ARGS)

tidy:
	go mod tidy

clean: ## remove what was built
	rm -rf $(BIN) $(TOOLS) bench/.cache
