package simdisk

import (
	"bytes"
	"math/bits"
	"slices"
	"sync"
)

// page is immutable once it is in a table: a write replaces it. Copies of a disk, and both versions of a file, share pages.
type page [pageBytes]byte

var zeroPage page

// minSectorBytes is the smallest sector: a page has at most one sector per bit of a sectorSet.
const minSectorBytes = pageBytes / 64

// sectorSet is a set of sectors of one page.
type sectorSet uint64

// inode is a file or a directory. A file has two versions of its contents: pages is what processes see, durable what is
// on the device for sure.
type inode struct {
	id  uint64
	dir bool

	pages, durable    pageTable
	size, durableSize int64
	// dirty has the pages that may differ between the two.
	dirty map[int64]*dirtyPage
	// reserved: blocks below this offset are allocated whether or not they were written.
	reserved int64
	blocks   int64
	// zeroed are pages that were written with zeros where the device has no block yet: no sector of them differs, but with the
	// next flush they have one.
	zeroed []int64

	links, opens int
}

// dirtyPage tells which sectors of a page are not durable.
type dirtyPage struct {
	set sectorSet
	// lost are those that a Sync that failed has covered; no later one does.
	lost sectorSet
	// flights counts the writes at the device per sector, flying the sectors that have any.
	flights [64]uint16
	flying  sectorSet
}

func newInode(id uint64, dir bool) *inode {
	return &inode{id: id, dir: dir, dirty: map[int64]*dirtyPage{}}
}

// pageTable has the pages of a file by their index; one that was never written is nil or beyond the end.
type pageTable []*page

// at returns the content of a page.
func (t pageTable) at(i int64) *page {
	if p := t.written(i); p != nil {
		return p
	}
	return &zeroPage
}

// written returns a page, nil if it was never written.
func (t pageTable) written(i int64) *page {
	if i < int64(len(t)) {
		return t[i]
	}
	return nil
}

func (t *pageTable) set(i int64, p *page) {
	if missing := i + 1 - int64(len(*t)); missing > 0 {
		*t = append(*t, make(pageTable, missing)...)
	}
	(*t)[i] = p
}

// read fills b from off and returns how much there is before the file's end.
func (n *inode) read(off int64, b []byte) int {
	if off < 0 || off >= n.size {
		return 0
	}
	b = b[:min(int64(len(b)), n.size-off)]
	for done := 0; done < len(b); {
		at := off + int64(done)
		done += copy(b[done:], n.pages.at(at / pageBytes)[at%pageBytes:])
	}
	return len(b)
}

// grows returns how many bytes of blocks a write or an allocation would take.
func (n *inode) grows(off, length int64) int64 {
	var blocks int64
	for p := max(off, n.reserved) / pageBytes; p*pageBytes < off+length; p++ {
		if p*pageBytes >= n.reserved && n.pages.written(p) == nil {
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
		n.writePage(index, int(from), b[done:done+int(length)], sectorBytes)
		done += int(length)
	}
	n.size = max(n.size, off+int64(len(b)))
	return took
}

func (n *inode) writePage(index int64, from int, b []byte, sectorBytes int) {
	switch {
	case len(b) < pageBytes:
		p := *n.pages.at(index)
		copy(p[from:], b)
		n.pages.set(index, &p)
	case bytes.Equal(b, zeroPage[:]):
		n.pages.set(index, &zeroPage)
		if n.durable.written(index) == nil {
			n.zeroed = append(n.zeroed, index)
		}
	default:
		n.pages.set(index, (*page)(bytes.Clone(b)))
	}
	n.touch(index, sectors(from, len(b), sectorBytes), sectorBytes)
}

// sectors returns the sectors of a page that bytes lie in.
func sectors(from, length, sectorBytes int) sectorSet {
	first, last := from/sectorBytes, (from+length-1)/sectorBytes
	return sectorSet(1)<<last<<1 - sectorSet(1)<<first
}

// all yields the sectors of a set.
func (s sectorSet) all(yield func(sector int) bool) {
	for ; s != 0; s &= s - 1 {
		if !yield(bits.TrailingZeros64(uint64(s))) {
			return
		}
	}
}

// spareDirty keeps those that nobody has any more: nearly every write needs one, for as long as it is at the device. In all
// of them nothing is set.
var spareDirty = sync.Pool{New: func() any { return new(dirtyPage) }}

func (n *inode) makeDirty(index int64) *dirtyPage {
	d := spareDirty.Get().(*dirtyPage)
	n.dirty[index] = d
	return d
}

// touch marks sectors as not durable where their contents differ from the device's, or a write of them is at the device.
func (n *inode) touch(index int64, set sectorSet, sectorBytes int) {
	d, p, q := n.dirty[index], n.pages.at(index), n.durable.at(index)
	if d == nil && p == q {
		return
	}
	if d == nil {
		d = n.makeDirty(index)
	}
	d.lost &^= set
	d.set |= set
	n.clean(index, d, set, sectorBytes)
}

// clean takes sectors out of those that aren't durable where they are the same on the device and no write is there.
func (n *inode) clean(index int64, d *dirtyPage, set sectorSet, sectorBytes int) {
	p, q := n.pages.at(index), n.durable.at(index)
	if set &= d.set &^ d.flying; p == q {
		d.set &^= set
	} else {
		for s := range set.all {
			if bytes.Equal(sectorOf(p, s, sectorBytes), sectorOf(q, s, sectorBytes)) {
				d.set &^= 1 << s
			}
		}
	}
	d.lost &= d.set
	if d.set == 0 && d.flying == 0 {
		delete(n.dirty, index)
		spareDirty.Put(d)
	}
}

// sectorOf returns the bytes of a sector.
func sectorOf(p *page, s, sectorBytes int) []byte { return p[s*sectorBytes:][:sectorBytes] }

// eachPage calls f for every page that a range touches, with the sectors of it.
func eachPage(off int64, length, sectorBytes int, f func(index int64, set sectorSet)) {
	for end := off + int64(length); off < end; {
		from := int(off % pageBytes)
		part := min(end-off, int64(pageBytes-from))
		f(off/pageBytes, sectors(from, int(part), sectorBytes))
		off += part
	}
}

// takeOff counts a write that goes to the device, land one that has ended.
func (n *inode) takeOff(off int64, length, sectorBytes int) {
	eachPage(off, length, sectorBytes, func(index int64, set sectorSet) {
		d := n.dirty[index]
		if d == nil {
			d = n.makeDirty(index)
		}
		d.flying |= set
		for s := range set.all {
			d.flights[s]++
		}
	})
}

func (n *inode) land(off int64, length, sectorBytes int) {
	eachPage(off, length, sectorBytes, func(index int64, set sectorSet) {
		d := n.dirty[index]
		for s := range set.all {
			if d.flights[s]--; d.flights[s] == 0 {
				d.flying &^= 1 << s
			}
		}
		n.clean(index, d, set, sectorBytes)
	})
}

// setDurable puts sectors of a page on the device, as they are in p.
func (n *inode) setDurable(index int64, p *page, set sectorSet, sectorBytes int) {
	d := n.dirty[index]
	if d != nil && d.set&^set == 0 && p == n.pages.at(index) {
		n.durable.set(index, p) // nothing else of the page differs
	} else {
		q := *n.durable.at(index)
		for s := range set.all {
			copy(sectorOf(&q, s, sectorBytes), sectorOf(p, s, sectorBytes))
		}
		n.durable.set(index, &q)
	}
	if d != nil {
		n.clean(index, d, set, sectorBytes)
	}
}

// persist makes a range durable, and the length that it needs.
func (n *inode) persist(off int64, length, sectorBytes int) {
	eachPage(off, length, sectorBytes, func(index int64, set sectorSet) {
		if d := n.dirty[index]; d != nil && d.set&set != 0 {
			n.setDurable(index, n.pages.at(index), d.set&set, sectorBytes)
		}
	})
	n.keepZeroed(off, off+int64(length))
	n.durableSize = max(n.durableSize, min(off+int64(length), n.size))
}

// keepZeroed has the blocks of zeros within a range on the device.
func (n *inode) keepZeroed(from, to int64) {
	n.zeroed = slices.DeleteFunc(n.zeroed, func(index int64) bool {
		at := index * pageBytes
		if at < from || at >= to {
			return false
		}
		if n.durable.written(index) == nil && n.pages.written(index) != nil {
			n.durable.set(index, &zeroPage)
		}
		return true
	})
}

// covered are sectors of a page as a Sync found them.
type covered struct {
	index int64
	page  *page
	set   sectorSet
}

// snapshot returns what a Sync submitted now makes durable.
func (n *inode) snapshot() []covered {
	var c []covered
	for index, d := range n.dirty {
		if set := d.set &^ d.lost &^ d.flying; set != 0 {
			c = append(c, covered{index, n.pages.at(index), set})
		}
	}
	return c
}

func (n *inode) persistAll(c []covered, size int64, sectorBytes int) {
	for _, s := range c {
		n.setDurable(s.index, s.page, s.set, sectorBytes)
	}
	n.keepZeroed(0, size)
	n.durableSize = size
}

// forget is what a failed Sync does.
func (n *inode) forget(c []covered) {
	for _, s := range c {
		if d := n.dirty[s.index]; d != nil {
			d.lost |= s.set & d.set
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
		for index := (size + pageBytes - 1) / pageBytes; index < int64(len(n.pages)); index++ {
			if n.pages[index] != nil {
				n.pages[index] = nil
				n.touch(index, sectors(0, pageBytes, sectorBytes), sectorBytes)
			}
		}
		if rest := size % pageBytes; rest != 0 && n.pages.written(size/pageBytes) != nil {
			p := *n.pages[size/pageBytes]
			clear(p[rest:])
			n.pages[size/pageBytes] = &p
			n.touch(size/pageBytes, sectors(int(rest), int(pageBytes-rest), sectorBytes), sectorBytes)
		}
		n.reserved = min(n.reserved, (size+pageBytes-1)&^(pageBytes-1))
		n.countBlocks()
	}
	n.size = size
	return (n.blocks - before) * pageBytes
}

// countBlocks counts the blocks that are reserved or written.
func (n *inode) countBlocks() {
	n.blocks = (n.reserved + pageBytes - 1) / pageBytes
	for index := n.blocks; index < int64(len(n.pages)); index++ {
		if n.pages[index] != nil {
			n.blocks++
		}
	}
}
