package wal

import (
	"github.com/mortarmq/mortarmq/ring"
)

const (
	// readWindow is how much of a journal file is read at a time; smallWindow is what does where the pool is short.
	readWindow  = 4 << 20
	smallWindow = 256 << 10
)

// roundReader reads rounds out of journal files, through a window that it moves over one file at a time. The window's
// slab is never written again, so that rounds may keep it.
type roundReader struct {
	io      *blockingDisk
	pool    *ring.Pool
	journal int

	// ahead is how much to read at least, where the file and the pool have it.
	ahead int

	slab *ring.Slab
	file *journalFile
	// base is where in the file the window starts, n how many bytes it has.
	base int64
	n    int
}

// found is a round in the window, or the reason why there is none.
type found struct {
	roundHeader
	// buf is the padded round; valid until the next call of the reader, or with a reference of the slab.
	buf []byte
	// bad is nil, or says why no round is there.
	bad error
}

// at looks for a round at off of f. The error is one of the disk or of the pool; bytes that are no round are no error.
func (rd *roundReader) at(f *journalFile, off int64) (found, error) {
	if off+ring.BlockSize > f.size {
		return found{bad: errRoundShort}, nil
	}
	b, err := rd.window(f, off, ring.BlockSize)
	if err != nil {
		return found{}, err
	}
	h, bad := peekRoundHeader(b, rd.journal, f.key)
	if bad != nil {
		return found{bad: bad}, nil
	}
	padded := blockAlign(h.size)
	if off+int64(padded) > f.size {
		return found{bad: errRoundShort}, nil
	}
	if b, err = rd.window(f, off, padded); err != nil {
		return found{}, err
	}
	return found{roundHeader: h, buf: b, bad: verifyRound(b, &h, f.key)}, nil
}

// window returns n bytes of f from off, both multiples of the block size and within the file.
func (rd *roundReader) window(f *journalFile, off int64, n int) ([]byte, error) {
	if rd.slab != nil && rd.file == f && off >= rd.base && off+int64(n) <= rd.base+int64(rd.n) {
		at := int(off - rd.base)
		return rd.slab.Bytes()[at : at+n : at+n], nil
	}
	rd.close()
	rest := int(min(f.size-off, int64(rd.ahead)))
	slab := rd.pool.Get(max(n, rest))
	if slab == nil {
		slab = rd.pool.Get(max(n, min(rest, smallWindow)))
	}
	if slab == nil {
		return nil, ErrNoMemory
	}
	length := min(int64(len(slab.Bytes())), f.size-off)
	op, err := rd.io.run(ring.Op{Kind: ring.Read, FD: f.fd, Off: off, Buf: slab.Bytes()[:length]})
	if err == nil && op.N < n {
		err = &CorruptionError{Path: f.path, Offset: off + int64(op.N), Cause: errFileShort}
	}
	if err != nil {
		slab.Release()
		return nil, err
	}
	rd.slab, rd.file, rd.base, rd.n = slab, f, off, op.N&^(ring.BlockSize-1)
	return slab.Bytes()[:n:n], nil
}

// close gives the window back.
func (rd *roundReader) close() {
	if rd.slab != nil {
		rd.slab.Release()
	}
	rd.slab = nil
}

// load makes a Round of what was found, with one reference.
func (rd *roundReader) load(rounds *roundPool, v *found) (*Round, error) {
	r := rounds.get()
	rd.slab.Retain()
	r.slab, r.buf = rd.slab, v.buf
	if err := r.load(&v.roundHeader); err != nil {
		r.Release()
		return nil, err
	}
	return r, nil
}
