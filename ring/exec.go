package ring

import (
	"errors"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	// maxTransfer is the most bytes one system call is asked to move. The kernel stops at 2 GiB less a page.
	maxTransfer = 1 << 30
	// maxTries is how often an operation is repeated after EINTR or EAGAIN before that becomes its error.
	maxTries = 128

	fileMode = 0o640
	dirMode  = 0o750
)

// part returns where the next transfer of a data operation starts, relative to Off and Buf, and its length.
//
// A read continues on a block boundary even if that repeats some bytes, since a direct read that continued behind an
// odd end of file would be refused instead of telling that the file ends.
func (op *Op) part() (start, length int) {
	start = op.done
	if op.Kind == Read {
		start &^= BlockSize - 1
	}
	return start, min(len(op.Buf)-start, maxTransfer)
}

// advance folds the result of a transfer of op that began at start into it: n bytes moved, or err. It tells whether
// the operation has ended; if not, the next part is to be transferred.
func (op *Op) advance(start, n int, err error) (ended bool) {
	switch {
	case err == nil:
	case op.Kind != Sync && (errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN)) && op.tries < maxTries:
		// Nothing was transferred. A flush is never repeated: after an error its outcome can't be known any more.
		op.tries++
		return false
	default:
		op.N = op.done
		op.Err = opError(op, err)
		return true
	}
	if op.Kind == Sync {
		return true
	}
	moved := start+n > op.done
	op.done = max(op.done, start+n)
	op.N = op.done
	switch {
	case op.done == len(op.Buf):
		return true
	case moved:
		return false
	case op.Kind != Read:
		op.Err = opError(op, io.ErrShortWrite)
	}
	return true // a read that got nothing new is at the end of the file
}

// transfer runs a data operation by ordinary system calls and fills in its result.
func transfer(op *Op, c *counters) {
	for {
		start, length := op.part()
		buf := op.Buf[start : start+length]
		off := op.Off + int64(start)
		var n int
		var err error
		c.syscalls.Add(1)
		switch op.Kind {
		case Read:
			n, err = unix.Pread(op.FD, buf, off)
		case Write:
			n, err = unix.Pwrite(op.FD, buf, off)
		case WriteSync:
			n, err = pwriteSync(op.FD, buf, off)
		default:
			err = unix.Fdatasync(op.FD)
		}
		if op.advance(start, n, err) {
			return
		}
	}
}

// pwriteSync writes buf at off and makes it durable, by one call where the kernel can.
func pwriteSync(fd int, buf []byte, off int64) (int, error) {
	vec := [1][]byte{buf}
	n, err := unix.Pwritev2(fd, vec[:], off, unix.RWF_DSYNC)
	if !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EOPNOTSUPP) {
		return n, err
	}
	n, err = unix.Pwrite(fd, buf, off)
	if err != nil {
		return n, err
	}
	return n, unix.Fdatasync(fd)
}

// fileOp runs a file-system operation and fills in its result. refused is called where the file system does not take
// O_DIRECT.
func fileOp(op *Op, refused func(path string)) {
	var err error
	switch op.Kind {
	case Open:
		op.FD, op.Direct, err = open(op.Path, op.Flags, refused)
	case Close:
		// Not repeated after EINTR: Linux has closed the descriptor all the same.
		err = unix.Close(op.FD)
	case Allocate:
		err = repeat(func() error { return unix.Fallocate(op.FD, 0, op.Off, op.Size) })
	case Truncate:
		err = repeat(func() error { return unix.Ftruncate(op.FD, op.Size) })
	case Rename:
		err = unix.Rename(op.Path, op.Path2)
	case Remove:
		err = remove(op.Path)
	case Mkdir:
		err = os.MkdirAll(op.Path, dirMode)
	case SyncDir:
		err = syncDir(op.Path)
	case ReadDir:
		op.Names, err = readDir(op.Path)
	case Stat:
		op.Size, err = stat(op.Path, op.FD)
	case Cached:
		op.Size, err = cached(op.FD, op.Off, op.Size)
	case Uncache:
		err = unix.Fadvise(op.FD, op.Off, op.Size, unix.FADV_DONTNEED)
	case StatFS:
		op.Size, err = available(op.Path)
	default:
		err = unix.EINVAL
	}
	if err != nil {
		op.Err = opError(op, err)
	}
}

// open opens a file. A file for direct I/O is opened twice: an open that is refused because of O_DIRECT may already have
// created the file, which would make an exclusive second attempt fail. Setting the flag afterwards would do with one, but
// then an overlay refuses the reads and writes instead.
func open(path string, flags OpenFlags, refused func(string)) (fd int, direct bool, err error) {
	mode := unix.O_CLOEXEC | unix.O_RDWR
	if flags&ReadOnly != 0 {
		mode = unix.O_CLOEXEC | unix.O_RDONLY
	}
	create := 0
	if flags&Create != 0 {
		create = unix.O_CREAT
		if flags&Exclusive != 0 {
			create |= unix.O_EXCL
		}
	}
	fd, err = openRepeat(path, mode|create)
	if err != nil || flags&Direct == 0 {
		return fd, false, err
	}
	if !directAligned(fd) {
		refused(path)
		return fd, false, nil
	}
	directFD, err := openRepeat(path, mode|unix.O_DIRECT)
	switch {
	case err == nil:
		return directFD, true, unix.Close(fd)
	case errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP):
		refused(path)
		return fd, false, nil
	}
	return -1, false, errors.Join(err, unix.Close(fd))
}

func openRepeat(path string, mode int) (fd int, err error) {
	err = repeat(func() error {
		fd, err = unix.Open(path, mode, fileMode)
		return err
	})
	return fd, err
}

// directAligned tells whether BlockSize is enough alignment for direct I/O on fd: false where the kernel says it isn't,
// true where it (before Linux 6.1) or the file system doesn't say.
func directAligned(fd int) bool {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 {
		return true
	}
	fits := func(align uint32) bool { return align != 0 && BlockSize%align == 0 }
	return fits(st.Dio_mem_align) && fits(st.Dio_offset_align)
}

func remove(path string) error {
	err := unix.Unlink(path)
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	dirErr := unix.Rmdir(path)
	if errors.Is(dirErr, unix.ENOTDIR) {
		return err
	}
	return dirErr
}

func syncDir(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fsync(fd), unix.Close(fd))
}

func readDir(path string) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	names, err := f.Readdirnames(-1)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	slices.Sort(names)
	return names, nil
}

func stat(path string, fd int) (int64, error) {
	var st unix.Stat_t
	err := repeat(func() error {
		if path == "" {
			return unix.Fstat(fd, &st)
		}
		return unix.Stat(path, &st)
	})
	return st.Size, err
}

func available(path string) (int64, error) {
	var st unix.Statfs_t
	err := repeat(func() error { return unix.Statfs(path, &st) })
	return int64(st.Bavail) * st.Frsize, err
}

// cached returns how many of size bytes are in the page cache; see the kind Cached.
func cached(fd int, off, size int64) (int64, error) {
	var st unix.Cachestat_t
	err := unix.Cachestat(uint(fd), &unix.CachestatRange{Off: uint64(off), Len: uint64(size)}, &st, 0)
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPERM): // the last from a seccomp filter
		return size, nil
	case err != nil:
		return 0, err
	case st.Dirty+st.Writeback > 0:
		return size, nil
	}
	return min(int64(st.Cache)*int64(os.Getpagesize()), size), nil
}

// repeat calls f until it ends otherwise than by EINTR, maxTries times at most.
func repeat(f func() error) error {
	err := f()
	for i := 0; i < maxTries && errors.Is(err, unix.EINTR); i++ {
		err = f()
	}
	return err
}
