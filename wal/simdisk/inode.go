package simdisk

import "bytes"

// page is immutable once it is in a map: a write replaces it. Copies of a disk share pages.
type page [pageBytes]byte

var zeroPage page

// inode is a file or a directory. A file has two versions of its contents: pages is what processes see, durable what is
// on the device for sure.
type inode struct {
	id  uint64
	dir bool

	pages, durable    map[int64]*page
	size, durableSize int64
	// dirty has the sectors that may differ between the two.
	dirty map[int64]sector
	// reserved: blocks below this offset are allocated whether or not they were written.
	reserved int64
	blocks   int64

	links, opens int
}

// sector is the state of one that is not durable.
type sector struct {
	inFlight int
	// lost: a Sync that failed covered it; no later one does.
	lost bool
}

func newInode(id uint64, dir bool) *inode {
	return &inode{id: id, dir: dir, pages: map[int64]*page{}, durable: map[int64]*page{}, dirty: map[int64]sector{}}
}

func pagesOf(m map[int64]*page, i int64) *page {
	if p := m[i]; p != nil {
		return p
	}
	return &zeroPage
}

// read fills b from off and returns how much there is before the file's end.
func (n *inode) read(off int64, b []byte) int {
	if off < 0 || off >= n.size {
		return 0
	}
	b = b[:min(int64(len(b)), n.size-off)]
	for done := 0; done < len(b); {
		at := off + int64(done)
		done += copy(b[done:], pagesOf(n.pages, at/pageBytes)[at%pageBytes:])
	}
	return len(b)
}

// grows returns how many bytes of blocks a write or an allocation would take.
func (n *inode) grows(off, length int64) int64 {
	var blocks int64
	for p := off / pageBytes; p*pageBytes < off+length; p++ {
		if n.pages[p] == nil && p*pageBytes >= n.reserved {
			blocks++
		}
	}
	return blocks * pageBytes
}

// write replaces bytes and returns how many bytes of blocks it took.
func (n *inode) write(off int64, b []byte, sectorBytes int) int64 {
	took := n.grows(off, int64(len(b)))
	n.blocks += took / pageBytes
	for done := 0; done < len(b); {
		at := off + int64(done)
		index, from := at/pageBytes, at%pageBytes
		length := min(int64(len(b)-done), pageBytes-from)
		p := *pagesOf(n.pages, index)
		copy(p[from:from+length], b[done:])
		n.setPage(index, &p)
		n.touch(at, length, sectorBytes)
		done += int(length)
	}
	n.size = max(n.size, off+int64(len(b)))
	return took
}

func (n *inode) setPage(index int64, p *page) {
	if *p == zeroPage {
		p = &zeroPage
	}
	n.pages[index] = p
}

// touch marks sectors as not durable where their contents differ from the device's.
func (n *inode) touch(off, length int64, sectorBytes int) {
	for s := off / int64(sectorBytes); s*int64(sectorBytes) < off+length; s++ {
		old := n.dirty[s]
		if old.inFlight == 0 && bytes.Equal(sectorOf(n.pages, s, sectorBytes), sectorOf(n.durable, s, sectorBytes)) {
			delete(n.dirty, s)
			continue
		}
		n.dirty[s] = sector{inFlight: old.inFlight}
	}
}

func sectorOf(m map[int64]*page, s int64, sectorBytes int) []byte {
	at := s * int64(sectorBytes)
	return pagesOf(m, at/pageBytes)[at%pageBytes:][:sectorBytes]
}

// inFlight counts writes at the device per sector.
func (n *inode) inFlight(off int64, length, sectorBytes, by int) {
	for s := off / int64(sectorBytes); s*int64(sectorBytes) < off+int64(length); s++ {
		if d, ok := n.dirty[s]; ok {
			d.inFlight += by
			n.dirty[s] = d
		}
	}
}

// setDurable puts a sector on the device.
func (n *inode) setDurable(s int64, data []byte, sectorBytes int) {
	at := s * int64(sectorBytes)
	p := *pagesOf(n.durable, at/pageBytes)
	copy(p[at%pageBytes:], data)
	n.durable[at/pageBytes] = &p
	if bytes.Equal(data, sectorOf(n.pages, s, sectorBytes)) {
		if n.dirty[s].inFlight == 0 {
			delete(n.dirty, s)
		}
	}
}

// persist makes a range durable, and the length that it needs.
func (n *inode) persist(off int64, length, sectorBytes int) {
	for s := off / int64(sectorBytes); s*int64(sectorBytes) < off+int64(length); s++ {
		if _, ok := n.dirty[s]; ok {
			n.setDurable(s, sectorOf(n.pages, s, sectorBytes), sectorBytes)
		}
	}
	n.durableSize = max(n.durableSize, min(off+int64(length), n.size))
}

// snapshot returns what a Sync submitted now makes durable.
func (n *inode) snapshot(sectorBytes int) []covered {
	var c []covered
	for s, state := range n.dirty {
		if state.inFlight == 0 && !state.lost {
			c = append(c, covered{s, sectorOf(n.pages, s, sectorBytes)})
		}
	}
	return c
}

func (n *inode) persistAll(c []covered, size int64, sectorBytes int) {
	for _, s := range c {
		n.setDurable(s.index, s.data, sectorBytes)
	}
	n.durableSize = size
}

// forget is what a failed Sync does.
func (n *inode) forget(c []covered) {
	for _, s := range c {
		if d, ok := n.dirty[s.index]; ok {
			d.lost = true
			n.dirty[s.index] = d
		}
	}
}

func (n *inode) allocate(off, size int64) int64 {
	took := n.grows(off, size)
	n.blocks += took / pageBytes
	if off <= n.reserved {
		n.reserved = max(n.reserved, off+size)
	}
	n.size = max(n.size, off+size)
	return took
}

// truncate sets the length and returns by how much the blocks changed in bytes.
func (n *inode) truncate(size int64, sectorBytes int) int64 {
	before := n.blocks
	if size < n.size {
		for index := range n.pages {
			if index*pageBytes >= size {
				delete(n.pages, index)
				n.touch(index*pageBytes, pageBytes, sectorBytes)
			}
		}
		if rest := size % pageBytes; rest != 0 && n.pages[size/pageBytes] != nil {
			p := *n.pages[size/pageBytes]
			clear(p[rest:])
			n.setPage(size/pageBytes, &p)
			n.touch(size, pageBytes-rest, sectorBytes)
		}
		n.reserved = min(n.reserved, (size+pageBytes-1)&^(pageBytes-1))
		n.blocks = n.reserved / pageBytes
		for index := range n.pages {
			if index*pageBytes >= n.reserved {
				n.blocks++
			}
		}
	}
	n.size = size
	return (n.blocks - before) * pageBytes
}
