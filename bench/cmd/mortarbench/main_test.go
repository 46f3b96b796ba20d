package main

import (
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mortarmq/mortarmq/bench/peers"
)

func TestParse_ExplicitFlagsWinOverQuick(t *testing.T) {
	for _, args := range [][]string{{"--quick", "--duration", "3s"}, {"--duration", "3s", "--quick"}} {
		cfg, err := parse(args, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		if cfg.Duration != 3*time.Second || cfg.Rounds != 1 {
			t.Errorf("%q: duration %v, %d rounds", args, cfg.Duration, cfg.Rounds)
		}
	}
}

func TestParse_ListsAndSettings(t *testing.T) {
	cfg, err := parse([]string{"--workloads", "raw,publish", "--sizes", "10,20", "--set", "shards=2,io_backend=pread,metrics_enabled=false", "--out", "x"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(cfg.Workloads, []string{"raw", "publish"}) || !slices.Equal(cfg.Sizes, []int{10, 20}) || cfg.Out != "x" {
		t.Errorf("got %+v", cfg)
	}
	if want := map[string]any{"shards": int64(2), "io_backend": "pread", "metrics_enabled": false}; !maps.Equal(cfg.Broker, want) {
		t.Errorf("settings %v, want %v", cfg.Broker, want)
	}
}

func TestParse_PeersByNameAndBySystem(t *testing.T) {
	for text, want := range map[string]string{
		"":                      "",
		"redis":                 "redis-always,redis-everysec",
		"rabbitmq,redis-always": "redis-always,rabbitmq,rabbitmq-3",
		"nats-r3-always":        "nats-r3-always",
	} {
		cfg, err := parse([]string{"--peers=" + text}, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(names(cfg.Peers), ","); got != want {
			t.Errorf("--peers=%s chooses %s, want %s", text, got, want)
		}
	}
	cfg, err := parse([]string{"--peers", "all", "--rounds", "7"}, io.Discard)
	if err != nil || len(cfg.Peers) != len(peers.All()) || cfg.Rounds != 7 || !slices.Equal(cfg.OtherSizes, []int{1024}) {
		t.Errorf("got %+v, %v", cfg, err)
	}
}

func TestParse_RefusesNonsense(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"--sizes 1KiB", "not a number"},
		{"--set shards", "key=value"},
		{"extra", "unexpected argument"},
		{"--peers kafka", "unknown peer"},
	} {
		if _, err := parse(strings.Fields(tt.args), io.Discard); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.args, err)
		}
	}
}
