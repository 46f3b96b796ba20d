// Package version tells what was built.
package version

import "runtime/debug"

// release is set by release builds: -ldflags='-X github.com/mortarmq/mortarmq/internal/version.release=v0.9.0'.
var release = ""

// Name returns the release; of other builds, what Go recorded about the module, or "devel".
func Name() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "devel"
}

// Commit returns the commit that was built, with "+changes" behind it if the working tree had any, or "unknown" for builds
// outside a repository.
func Commit() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	return commitOf(info.Settings)
}

func commitOf(settings []debug.BuildSetting) string {
	commit, changes := "unknown", ""
	for _, s := range settings {
		switch {
		case s.Key == "vcs.revision" && s.Value != "":
			commit = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			changes = "+changes"
		}
	}
	return commit + changes
}
