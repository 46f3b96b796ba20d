package version

import (
	"runtime/debug"
	"testing"
)

func TestName_PrefersTheRelease(t *testing.T) {
	if Name() == "" {
		t.Error("a build without release has no name")
	}
	release = "v1.2.3"
	defer func() { release = "" }()
	if got := Name(); got != "v1.2.3" {
		t.Errorf("the release is %q", got)
	}
}

func TestCommit_TellsOfChanges(t *testing.T) {
	for want, settings := range map[string][]debug.BuildSetting{
		"unknown":         nil,
		"abc":             {{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: "false"}},
		"abc+changes":     {{Key: "vcs.modified", Value: "true"}, {Key: "vcs.revision", Value: "abc"}},
		"unknown+changes": {{Key: "vcs.modified", Value: "true"}},
	} {
		if got := commitOf(settings); got != want {
			t.Errorf("%v: %q, want %q", settings, got, want)
		}
	}
}
