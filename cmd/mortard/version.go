package main

import (
	"fmt"
	"runtime"

	"github.com/mortarmq/mortarmq/internal/version"
	"github.com/mortarmq/mortarmq/ring"
)

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
	return fmt.Sprintf("mortard %s\ncommit: %s\n%s %s/%s\nio backend: %s\n",
		version.Name(), version.Commit(), runtime.Version(), runtime.GOOS, runtime.GOARCH, backend)
}
