package wal

import "github.com/mortarmq/mortarmq/ring"

// writeBuffer gathers the pieces of several streams. It is free again when the last of their writes has ended.
type writeBuffer struct {
	slab *ring.Slab
	used int
	refs int
}

// piece is one write to a file.
type piece struct {
	op  ring.Op
	s   *Store
	seg *segment
	buf *writeBuffer
}

// pass is one write-out over the streams that had something to write when it began.
type pass struct {
	active bool
	// seal ends every file that was written since the last sweep on a block boundary.
	seal bool
	// upTo is the last round that was complete when the pass began.
	upTo    journalPoint
	queue   []*stream
	at      int
	running int
	writes  int
	pumping bool
}

// stepPass begins a write-out when it is due, and keeps the present one going.
func (s *Store) stepPass() {
	if !s.pass.active && s.passDue() {
		s.beginPass(s.sweepDue())
	}
	s.pumpPass()
}

func (s *Store) passDue() bool {
	switch {
	case s.sweepDue():
		return true
	case s.pending == 0:
		return s.written.Round < s.added.Round
	case s.dirty >= s.o.MaxDirtyBytes && !s.recovering:
		return false // a sweep is under way and makes room
	}
	return s.unpaced || s.pending >= s.o.WriteOutBytes || s.now-s.oldest >= s.o.WriteOutEvery
}

func (s *Store) beginPass(seal bool) {
	p := &s.pass
	p.active, p.seal, p.upTo = true, seal, s.added
	p.queue, p.at = append(p.queue[:0], s.dirtyStreams...), 0
	for i, st := range s.dirtyStreams {
		st.queued, st.inPass = false, true
		s.dirtyStreams[i] = nil
	}
	s.dirtyStreams = s.dirtyStreams[:0]
	if !seal {
		return
	}
	for i, st := range s.unsealed {
		st.unsealed = false
		if !st.inPass {
			st.inPass = true
			p.queue = append(p.queue, st)
		}
		s.unsealed[i] = nil
	}
	s.unsealed = s.unsealed[:0]
	s.beginSweep(p.upTo)
}

// pumpPass starts streams of the pass, up to the limits, and ends the pass behind the last write. What a stream does may
// call it again; the outermost call does the work.
func (s *Store) pumpPass() {
	p := &s.pass
	if !p.active || p.pumping || s.err != nil {
		return
	}
	p.pumping = true
	for p.at < len(p.queue) && p.running < maxWriters && len(s.waiting) == 0 && s.err == nil && !s.paused() {
		st := p.queue[p.at]
		p.queue[p.at] = nil
		p.at++
		s.slice++
		p.running++
		s.advance(st)
	}
	p.pumping = false
	if p.at == len(p.queue) && p.running == 0 && p.writes == 0 && s.err == nil {
		s.endPass()
	}
}

func (s *Store) endPass() {
	p := &s.pass
	p.active = false
	if s.pending > 0 {
		s.oldest = s.now
	}
	moved := p.upTo.Round > s.written.Round
	s.written = p.upTo
	if moved && s.onWritten != nil {
		s.onWritten(s.written.Round)
	}
	if p.seal {
		s.syncSweep()
	}
	s.stepPass()
}

// advance does what can be done for a stream of the pass: it writes what waits, opening and beginning files as needed.
// What it starts may end at once and call it again; the outermost call does the work.
//
// The pass goes on behind that work, not within it: the stream may be the last one of its pass and at once part of the
// next, which has to find it at rest.
func (s *Store) advance(st *stream) {
	if st.advancing {
		return
	}
	st.advancing = true
	for s.err == nil && !st.busy && s.advanceOnce(st) {
	}
	st.advancing = false
	s.pumpPass()
}

// advanceOnce does the next thing for a stream. It returns false where the stream has to wait or has left the pass.
func (s *Store) advanceOnce(st *stream) bool {
	switch {
	case st.dropped:
		s.discard(st)
		s.leavePass(st)
		return false
	case st.head == len(st.runs) && !(s.pass.seal && st.active != nil && padLen(st.off) > 0):
		s.leavePass(st)
		return false
	case st.active != nil && (st.held == nil || st.cut):
		s.openActive(st)
		return true
	case st.active == nil, s.rollDue(st) && padLen(st.off) == 0:
		s.startFile(st, st.runs[st.head].first)
		return true
	}
	if s.large(st) && st.active.direct < 0 && !st.active.noDirect {
		s.openDirect(st)
		return true
	}
	if !s.gather(st) {
		s.waiting = append(s.waiting, st)
		return false
	}
	return true
}

// rollDue tells whether the next run begins a new file.
func (s *Store) rollDue(st *stream) bool {
	if st.head == len(st.runs) || st.runs[st.head].pos > 0 || st.off <= segmentHeaderLen {
		return false
	}
	r := &st.runs[st.head]
	limit := s.o.SegmentMaxBytes
	if st.id.Kind != Messages {
		limit = MaxSegmentBytes
		if s.snaps.covers(st.id.Kind, st.active.base) {
			limit = s.o.LogRollBytes
		}
	}
	return r.roll || st.off+int64(len(r.data)) > limit
}

// leavePass ends a stream's part in the pass; its writes may still be under way. Only advanceOnce calls it.
func (s *Store) leavePass(st *stream) {
	st.inPass = false
	s.letGo(st)
	s.pass.running--
	if s.pass.seal && !st.dropped && st.active != nil && st.wnext > 1 {
		st.sealed = checkpoint{Next: st.wnext, Base: st.active.base, Offset: uint32(st.off), LastMs: st.lastMs}
	}
	s.settle(st)
}

// settle moves what can be read behind the stream's last completed write.
func (s *Store) settle(st *stream) {
	if st.inflight > 0 || st.inPass {
		return
	}
	if st.active != nil {
		st.readNext, st.readOff, st.readSeg = st.wnext, st.off, st.active
	}
}

// gather copies what waits for a stream into the write buffer and submits it as one write. It returns false where no
// buffer is free.
func (s *Store) gather(st *stream) bool {
	w := s.takeBuffer()
	if w == nil {
		return false
	}
	off := st.off
	direct := s.large(st) && st.active.direct >= 0
	if direct {
		// Whole blocks of the file are whole blocks in memory.
		w.used = min(w.used+int((off-int64(w.used))&(ring.BlockSize-1)), writeBufferBytes)
	}
	room := w.slab.Bytes()[w.used:writeBufferBytes]
	n := s.fill(st, room)
	if n == 0 {
		// Not even a header or pad fits.
		s.buffer = nil
		if w.refs == 0 {
			w.used = 0
			s.buffers = append(s.buffers, w)
		}
		return true
	}
	w.used += n
	s.submitPieces(st, w, off, room[:n:n], direct)
	if w.used == writeBufferBytes {
		s.buffer = nil
	}
	return true
}

// fill copies header, records and pad into room, as much as fits, and moves the stream's end.
func (s *Store) fill(st *stream, room []byte) int {
	n := 0
	if st.off == 0 {
		if len(room) < segmentHeaderLen {
			return 0
		}
		putSegmentHeader(room, &segmentHeader{
			Stream: st.id, Journal: s.o.Journal, Base: st.active.base, CreatedMs: s.o.Wall(),
		})
		n = segmentHeaderLen
		st.off = segmentHeaderLen
		st.index.write(room[:n])
	}
	for st.head < len(st.runs) && n < len(room) && !s.rollDue(st) {
		n += s.fillRun(st, room[n:])
	}
	if pad := padLen(st.off); pad > 0 && pad <= len(room)-n && s.padDue(st) {
		clear(room[n : n+pad])
		st.index.write(room[n : n+pad])
		n += pad
		st.off += int64(pad)
	}
	return n
}

// padDue tells whether the stream's file ends here on a block boundary.
func (s *Store) padDue(st *stream) bool {
	if st.head == len(st.runs) {
		return s.pass.seal
	}
	return s.rollDue(st)
}

// fillRun copies the next run, or a part of it.
func (s *Store) fillRun(st *stream, room []byte) int {
	r := &st.runs[st.head]
	if r.pos == 0 && st.id.Kind == Messages {
		st.lastMs = max(st.lastMs, st.index.markRun(r.data, st.off))
	}
	n := copy(room, r.data[r.pos:])
	if st.id.Kind == Messages {
		st.index.write(room[:n])
	}
	st.off += int64(n)
	s.pending -= int64(n)
	st.pending -= int64(n)
	if r.pos += n; r.pos == len(r.data) {
		st.wnext = r.last + 1
		r.round.Release()
		*r = run{}
		st.head++
	}
	return n
}

// takeBuffer returns the write buffer with room, or nil.
func (s *Store) takeBuffer() *writeBuffer {
	if s.buffer == nil {
		if len(s.buffers) == 0 {
			return nil
		}
		s.buffer = s.buffers[len(s.buffers)-1]
		s.buffers = s.buffers[:len(s.buffers)-1]
	}
	return s.buffer
}

// large tells whether enough waits for a stream to write it past the page cache.
func (s *Store) large(st *stream) bool {
	return s.o.DirectBytes >= 0 && st.pending >= s.o.DirectBytes && st.id.Kind == Messages
}

// submitPieces writes buf at off: its whole blocks directly, if so asked and if they are worth it, the rest through the
// page cache. A block is never written both ways.
func (s *Store) submitPieces(st *stream, w *writeBuffer, off int64, buf []byte, direct bool) {
	seg := st.active
	head := int(-off & (ring.BlockSize - 1))
	body := (len(buf) - head) &^ (ring.BlockSize - 1)
	if !direct || int64(body) < s.o.DirectBytes/4 {
		s.submitPiece(st, w, seg.fd, off, buf)
		return
	}
	if head > 0 {
		s.submitPiece(st, w, seg.fd, off, buf[:head])
	}
	s.submitPiece(st, w, seg.direct, off+int64(head), buf[head:head+body])
	if head+body < len(buf) {
		s.submitPiece(st, w, seg.fd, off+int64(head+body), buf[head+body:])
	}
}

func (s *Store) submitPiece(st *stream, w *writeBuffer, fd int, off int64, buf []byte) {
	var p *piece
	if n := len(s.pieces); n > 0 {
		p = s.pieces[n-1]
		s.pieces = s.pieces[:n-1]
	} else {
		p = &piece{s: s}
		p.op.Done = p.done
	}
	seg := st.active
	s.use(seg)
	s.markDirty(seg, len(buf))
	s.spend(len(buf))
	if !st.unsealed && !s.pass.seal {
		st.unsealed = true
		s.unsealed = append(s.unsealed, st)
	}
	w.refs++
	seg.writes++
	st.inflight++
	s.pass.writes++
	s.inflight++
	p.seg, p.buf = seg, w
	p.op.Kind, p.op.FD, p.op.Off, p.op.Buf = ring.Write, fd, off, buf
	// Into the page cache by the store's own thread: io_uring gives each such write to a worker thread of the kernel, to wake
	// which takes as long as the write.
	p.op.Inline = fd == seg.fd
	seg.buffered = seg.buffered || p.op.Inline
	s.disk.Submit(&p.op)
}

// markDirty makes the next sweep flush a file. Until then it stays open, see release.
func (s *Store) markDirty(seg *segment, n int) {
	if seg.idle {
		s.idle.remove(seg)
	}
	seg.dirty += int64(n)
	s.dirty += int64(n)
	if !seg.queued {
		seg.queued = true
		s.dirtySegs = append(s.dirtySegs, seg)
	}
}

// done ends a write.
func (p *piece) done(op *ring.Op) {
	s, seg, w := p.s, p.seg, p.buf
	s.inflight--
	if op.Err != nil && noSpace(op.Err) && s.err == nil {
		s.starve("write segment", op.Err, func() {
			s.inflight++
			s.disk.Submit(&p.op)
		})
		return
	}
	if op.Err != nil {
		s.fail("write segment", seg.st.path(seg), op.Err)
	}
	p.seg, p.buf, p.op.Buf = nil, nil, nil
	s.pieces = append(s.pieces, p)
	s.pass.writes--
	if w.refs--; w.refs == 0 {
		w.used = 0
		if w != s.buffer {
			s.buffers = append(s.buffers, w)
		}
	}
	st := seg.st
	st.inflight--
	seg.writes--
	s.release(seg)
	s.settle(st)
	if seg.writes == 0 && s.err == nil {
		st.openLoads(seg)
	}
	s.resumeWaiting()
	s.pumpPass()
}

// resumeWaiting goes on with the streams that wait for a buffer.
func (s *Store) resumeWaiting() {
	for len(s.waiting) > 0 && (s.buffer != nil || len(s.buffers) > 0) && s.err == nil {
		st := s.waiting[0]
		copy(s.waiting, s.waiting[1:])
		s.waiting = s.waiting[:len(s.waiting)-1]
		s.advance(st)
	}
}
