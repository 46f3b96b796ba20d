package wal

// grower prepares further files.
type grower struct {
	busy bool
}
