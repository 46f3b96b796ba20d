package main

import (
	"strings"
	"testing"
)

// What a shell asks for behind the TAB key.
func TestComplete_OffersWhatThereIs(t *testing.T) {
	t.Setenv(envAdmin, startAdmin(t))
	for args, want := range map[string]string{
		"topics describe |":              "events orders",
		"topics delete |":                "events orders",
		"pub |":                          "events orders",
		"pub orders |":                   "",
		"sub --group |":                  "billing mail",
		"sub orders --from |":            "earliest latest",
		"groups describe |":              "billing mail",
		"groups delete x --topic |":      "events orders",
		"groups create x --strategy |":   "sticky averagely circle",
		"groups reset x --to |":          "earliest latest",
		"dlq list |":                     "billing mail",
		"topics create x --durability |": "memory local quorum",
	} {
		words := append([]string{"__complete"}, strings.Fields(args)...)
		words[len(words)-1] = "" // what is completed
		r := mortarmq(t, "", words...)
		lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
		if got := strings.Join(lines[:len(lines)-1], " "); r.code != exitDone || got != want {
			t.Errorf("%s: %q, want %q; exit code %d, %s", args, got, want, r.code, r.stderr)
		}
	}
}

func TestComplete_WithoutABrokerOffersNothing(t *testing.T) {
	t.Setenv(envAdmin, closedPort(t))
	if r := mortarmq(t, "", "__complete", "pub", ""); r.code != exitDone || !strings.HasPrefix(r.stdout, ":") {
		t.Errorf("exit code %d, %q", r.code, r.stdout)
	}
}
