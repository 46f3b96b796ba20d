package bench

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Environment is what a figure means nothing without.
type Environment struct {
	Time       time.Time
	Commit     string
	Mortard    string // mortard --version
	Go         string
	Kernel     string
	CPU        string
	CPUs       int
	MemoryMiB  int
	FileSystem string
	Command    string
	Peers      []string `json:",omitempty"` // name: version, setting
}

// ReadEnvironment describes this machine, the working tree and the broker. What can't be found out is left empty.
func ReadEnvironment(cfg *Config) *Environment {
	e := &Environment{
		Time:       time.Now().UTC().Truncate(time.Second),
		Commit:     output("git", "describe", "--always", "--dirty", "--abbrev=12"),
		Mortard:    output(cfg.Mortard, "--version"),
		Go:         runtime.Version(),
		CPUs:       runtime.NumCPU(),
		CPU:        cpuModel(),
		FileSystem: fileSystem(cfg.Dir),
		Command:    strings.Join(os.Args, " "),
	}
	for _, p := range cfg.Peers {
		e.Peers = append(e.Peers, fmt.Sprintf("%s: %s; %s", p.Name, p.Version(&PeerOptions{Cache: cfg.Cache}), p.About))
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		e.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		e.MemoryMiB = int(info.Totalram * uint64(info.Unit) >> 20)
	}
	return e
}

// String is the heading of a report.
func (e *Environment) String() string {
	text := fmt.Sprintf("%s  commit %s  %s\n%s, %d CPUs (%s), %d MiB, Linux %s, %s\n%s",
		e.Time.Format(time.RFC3339), e.Commit, e.Mortard, e.Go, e.CPUs, e.CPU, e.MemoryMiB, e.Kernel, e.FileSystem, e.Command)
	return strings.Join(append([]string{text}, e.Peers...), "\n")
}

func output(name string, args ...string) string {
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func cpuModel() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte("model name")); ok {
			return string(bytes.Trim(rest, " \t:\n"))
		}
	}
	return ""
}

// fileSystem names the mount that holds dir: device, type and mount point (proc(5), /proc/mounts).
func fileSystem(dir string) string {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return ""
	}
	text, err := os.ReadFile("/proc/mounts")
	if err != nil {
		return ""
	}
	best, mount := "", ""
	for line := range bytes.Lines(text) {
		f := strings.Fields(string(line))
		if len(f) < 3 {
			continue
		}
		inside := f[1] == "/" || abs == f[1] || strings.HasPrefix(abs, f[1]+"/")
		if inside && len(f[1]) >= len(mount) {
			mount, best = f[1], fmt.Sprintf("%s on %s (%s)", f[2], f[0], f[1])
		}
	}
	return best
}
