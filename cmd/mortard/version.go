package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/mortarmq/mortarmq/ring"
)

// version is set by release builds with -X; otherwise it comes from the module and the commit that Go records.
var version = ""

// buildVersion names what was built.
func buildVersion() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	if v == "" || v == "(devel)" {
		v = "devel"
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				v += "-" + s.Value[:12]
			}
		}
	}
	return v
}

// versionText is what --version prints. It tries out which way of doing I/O this machine allows.
func versionText() string {
	var backend string
	r, err := ring.New(ring.Options{Backend: ring.Auto})
	if err != nil {
		backend = "none: " + err.Error()
	} else {
		backend = r.Backend()
		if reason := r.Reason(); reason != "" {
			backend += " (" + reason + ")"
		}
		_ = r.Close() // nothing was submitted
	}
	return fmt.Sprintf("mortard %s\n%s %s/%s\nio backend: %s\n", buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH, backend)
}
