package ring

import (
	"errors"
	"fmt"
	"strconv"
)

// ErrClosed is the error of operations submitted to a ring that is closing or closed.
var ErrClosed = errors.New("ring is closed")

// OpError tells which operation on which file failed and why. It unwraps to the cause, normally a syscall.Errno, so
// that errors.Is with fs.ErrNotExist, fs.ErrExist or unix.ENOSPC works.
type OpError struct {
	Kind Kind
	// Path is the file's path for file-system operations, else empty; Path2 the new one of a Rename.
	Path  string
	Path2 string
	// FD is the file for operations without a path.
	FD int
	// Off and Len are the range in bytes, for operations that have one.
	Off int64
	Len int64
	Err error
}

// Error implements error.
func (e *OpError) Error() string {
	subject := "fd " + strconv.Itoa(e.FD)
	if e.Path != "" {
		subject = e.Path
	}
	if e.Path2 != "" {
		subject += " to " + e.Path2
	}
	if e.Kind.ranged() {
		return fmt.Sprintf("%v %s, %d bytes at offset %d: %v", e.Kind, subject, e.Len, e.Off, e.Err)
	}
	return fmt.Sprintf("%v %s: %v", e.Kind, subject, e.Err)
}

// Unwrap returns the cause.
func (e *OpError) Unwrap() error { return e.Err }

// opError describes the failure of op. The cause is never nil.
func opError(op *Op, cause error) error {
	e := &OpError{Kind: op.Kind, Path: op.Path, Path2: op.Path2, FD: op.FD, Off: op.Off, Len: int64(len(op.Buf)), Err: cause}
	if op.Kind == Allocate {
		e.Len = op.Size
	}
	return e
}

var kindNames = [...]string{
	Read: "read", Write: "write", WriteSync: "write-sync", Sync: "sync", Open: "open", Close: "close",
	Allocate: "allocate", Truncate: "truncate", Rename: "rename", Remove: "remove", Mkdir: "mkdir",
	SyncDir: "sync-dir", ReadDir: "read-dir", Stat: "stat", Cached: "cached", Uncache: "uncache", StatFS: "stat-fs",
}

// String returns the kind's name as it stands in errors.
func (k Kind) String() string {
	if k.valid() {
		return kindNames[k]
	}
	return "kind(" + strconv.Itoa(int(k)) + ")"
}

func (k Kind) valid() bool { return k >= Read && k <= StatFS }

// data tells whether the kind goes through io_uring where there is one.
func (k Kind) data() bool { return k >= Read && k <= Sync }

// brief tells whether operations of the kind run on the owner's thread because they take less than to hand them on.
func (k Kind) brief() bool { return k == Cached || k == Uncache }

// ranged tells whether Off and a length mean something.
func (k Kind) ranged() bool { return k == Read || k == Write || k == WriteSync || k == Allocate }
