package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"
)

// Usage is what a process has consumed so far.
type Usage struct {
	// User and System are the CPU time of all its threads, in steps of the kernel's clock tick (10 ms).
	User, System time.Duration
	// RSS is the resident memory now, PeakRSS the highest so far, in bytes.
	RSS, PeakRSS int64
}

// CPU returns user and system time together.
func (u Usage) CPU() time.Duration { return u.User + u.System }

// clockTick is the unit of times in /proc/<pid>/stat: USER_HZ, 100 on every Linux port that Go supports.
const clockTick = time.Second / 100

// Usage reads the process's CPU time and memory from /proc.
func (d *Daemon) Usage() (Usage, error) { return ReadUsage(d.PID()) }

// ExitCPU returns the CPU time that the process had used when it ended, exactly; 0 before that. (The peak memory that the
// kernel reports then is no use: it counts what this process had before exec.)
func (d *Daemon) ExitCPU() time.Duration {
	select {
	case <-d.exited:
		return d.cmd.ProcessState.UserTime() + d.cmd.ProcessState.SystemTime()
	default:
		return 0
	}
}

// ReadUsage reads CPU time and memory of a process from /proc (proc(5): stat fields 14 and 15, VmRSS and VmHWM of
// status).
func ReadUsage(pid int) (Usage, error) {
	var u Usage
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return u, err
	}
	if u.User, u.System, err = parseStat(stat); err != nil {
		return u, err
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	u.RSS = statusBytes(status, "VmRSS:")
	u.PeakRSS = statusBytes(status, "VmHWM:")
	return u, nil
}

func parseStat(stat []byte) (user, system time.Duration, err error) {
	// The second field is the command's name in parentheses and may hold anything: count from its end.
	end := bytes.LastIndexByte(stat, ')')
	fields := bytes.Fields(stat[end+1:])
	const utime, stime = 14 - 3, 15 - 3
	if end < 0 || len(fields) <= stime {
		return 0, 0, fmt.Errorf("unexpected form of /proc stat: %q", stat)
	}
	u, err := strconv.ParseInt(string(fields[utime]), 10, 64)
	if err != nil {
		return 0, 0, err
	}
	s, err := strconv.ParseInt(string(fields[stime]), 10, 64)
	if err != nil {
		return 0, 0, err
	}
	return time.Duration(u) * clockTick, time.Duration(s) * clockTick, nil
}

// statusBytes returns a "Name:  123 kB" line of /proc status in bytes, 0 where it is missing.
func statusBytes(status []byte, name string) int64 {
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte(name)); ok {
			if f := bytes.Fields(rest); len(f) > 0 {
				kib, _ := strconv.ParseInt(string(f[0]), 10, 64)
				return kib << 10
			}
		}
	}
	return 0
}

// Fetch gets a path of the admin listener, such as "/metrics", into w.
func (d *Daemon) Fetch(path string, w io.Writer) error {
	resp, err := http.Get("http://" + d.AdminAddr + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return fmt.Errorf("GET %s: %s: %s", path, resp.Status, text)
	}
	_, err = io.Copy(w, resp.Body)
	return err
}

// FetchJSON gets a path of the admin listener and decodes the JSON that it answers with into v.
func (d *Daemon) FetchJSON(path string, v any) error {
	body, err := d.get(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("GET %s: %w", path, err)
	}
	return nil
}
