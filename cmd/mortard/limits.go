package main

import "golang.org/x/sys/unix"

// fileShare is how many descriptors the stores may keep open without using them: what the client port (net/client) leaves
// of the process's limit, an eighth and at least 64.
func fileShare() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 64
	}
	return shareOf(limit.Cur)
}

func shareOf(limit uint64) int { return int(max(min(limit, 1<<20)/8, 64)) }
