package simdisk

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
)

// ItemKind tells what an Item is.
type ItemKind uint8

const (
	// Sector is one sector of a file.
	Sector ItemKind = iota + 1
	// Size is the length of a file.
	Size
	// Name is one change of a directory.
	Name
)

// Item is something that a power cut now may or may not keep.
type Item struct {
	Kind ItemKind
	// Path is the file, or for a Name what changes.
	Path string
	// Offset is where the sector starts in its file.
	Offset int64
	// InFlight tells that the write of the sector has not completed.
	InFlight bool
}

// Fate is what becomes of an Item.
type Fate uint8

const (
	// Drop leaves what was durable before.
	Drop Fate = iota
	// Keep makes it as if it had been flushed.
	Keep
	// Torn, of a sector, keeps its first half only. Of anything else it is Keep.
	Torn
)

// item is an Item with what it stands for.
type item struct {
	Item
	node *inode
	// page and sector locate a sector.
	page   int64
	sector int
	op     *dirOp
}

// items lists everything that isn't durable, in a fixed order: sectors and sizes by file and offset, then the names.
func (d *Disk) items() []item {
	paths := map[*inode]string{}
	for p, n := range d.kept {
		paths[n] = p
	}
	for i := range d.dirOps {
		o := &d.dirOps[i]
		paths[o.node] = o.path
	}
	for p, n := range d.names {
		paths[n] = p
	}
	nodes := slices.SortedFunc(maps.Keys(paths), func(a, b *inode) int { return cmp.Compare(a.id, b.id) })
	var list []item
	for _, n := range nodes {
		for _, index := range slices.Sorted(maps.Keys(n.dirty)) {
			dirty := n.dirty[index]
			for s := range dirty.set.all {
				list = append(list, item{
					Item: Item{Kind: Sector, Path: paths[n], Offset: index*pageBytes + int64(s*d.opts.SectorBytes),
						InFlight: dirty.flying>>s&1 == 1},
					node: n, page: index, sector: s,
				})
			}
		}
		if n.size != n.durableSize {
			list = append(list, item{Item: Item{Kind: Size, Path: paths[n]}, node: n})
		}
	}
	for i := range d.dirOps {
		o := &d.dirOps[i]
		list = append(list, item{Item: Item{Kind: Name, Path: o.String()}, op: o})
	}
	return list
}

// Pending returns what a power cut now may or may not keep, in the order in which Crash asks.
func (d *Disk) Pending() []Item {
	d.mu.Lock()
	defer d.mu.Unlock()
	var list []Item
	for _, it := range d.items() {
		list = append(list, it.Item)
	}
	return list
}

// Crash returns the disk that a power cut now leaves; this one goes on unharmed. pick is asked for each pending item by
// its index; nil drops everything. The new disk has no open files, nothing in flight, no faults, holds or hooks.
func (d *Disk) Crash(pick func(i int, it Item) Fate) *Disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.items()
	fates := make([]Fate, len(list))
	for i := range list {
		if pick != nil {
			fates[i] = pick(i, list[i].Item)
		}
	}
	c := d.successor()
	copies := map[*inode]*inode{}
	survivor := func(n *inode) *inode {
		if copies[n] == nil {
			k := newInode(n.id, n.dir)
			k.durable, k.durableSize, k.reserved = slices.Clone(n.durable), n.durableSize, n.reserved
			copies[n] = k
		}
		return copies[n]
	}
	for p, n := range d.kept {
		c.kept[p] = survivor(n)
	}
	for i, it := range list {
		if fates[i] == Drop {
			continue
		}
		switch it.Kind {
		case Sector:
			data := sectorOf(it.node.pages.at(it.page), it.sector, d.opts.SectorBytes)
			if fates[i] == Torn {
				data = data[:len(data)/2]
			}
			k := survivor(it.node)
			p := *k.durable.at(it.page)
			copy(p[it.Offset%pageBytes:], data)
			k.durable.set(it.page, &p)
		case Size:
			survivor(it.node).durableSize = it.node.size
		case Name:
			o := *it.op
			o.node = survivor(o.node)
			o.do(c.kept)
		}
	}
	c.boot()
	return c
}

// successor returns the empty disk that takes this one's place; its order of completions is another one.
func (d *Disk) successor() *Disk {
	opts := d.opts
	if opts.Seed != 0 {
		opts.Seed = max(rand.New(rand.NewPCG(opts.Seed, d.seq)).Uint64(), 1)
	}
	c := New(opts)
	c.inodes, c.seq = d.inodes, d.seq
	return c
}

// RandomFates returns choices for Crash: most power cuts keep nearly all or nearly nothing, some tear, some are fair.
func RandomFates(rng *rand.Rand) func(i int, it Item) Fate {
	drop, torn := []float64{0, 0, 0.05, 0.5, 0.95, 1}[rng.IntN(6)], []float64{0, 0, 0.1, 0.3}[rng.IntN(4)]
	return func(int, Item) Fate {
		switch x := rng.Float64(); {
		case x < drop:
			return Drop
		case rng.Float64() < torn:
			return Torn
		default:
			return Keep
		}
	}
}

// boot makes what is durable visible.
func (d *Disk) boot() {
	for {
		orphans := 0
		for p := range d.kept {
			if dir := path.Dir(p); dir != "/" && dir != "." && (d.kept[dir] == nil || !d.kept[dir].dir) {
				delete(d.kept, p)
				orphans++
			}
		}
		if orphans == 0 {
			break
		}
	}
	d.names = maps.Clone(d.kept)
	for _, n := range d.kept {
		n.links++
		n.size = n.durableSize
		if pages := (n.size + pageBytes - 1) / pageBytes; pages < int64(len(n.durable)) {
			n.durable = n.durable[:pages:pages]
		}
		if rest := n.size % pageBytes; rest != 0 && n.durable.written(n.size/pageBytes) != nil {
			cut := *n.durable[n.size/pageBytes]
			clear(cut[rest:])
			n.durable[n.size/pageBytes] = &cut
		}
		n.pages = slices.Clone(n.durable)
		n.reserved = min(n.reserved, n.size)
		n.countBlocks()
		if n.links == 1 {
			d.used += n.blocks * pageBytes
		}
	}
}

// Clone returns the disk that the end of all processes leaves, without a power cut: everything that was written is there,
// what wasn't flushed still isn't durable. The new disk has no open files, nothing in flight, no faults, holds or hooks.
func (d *Disk) Clone() *Disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.successor()
	copies := map[*inode]*inode{}
	twin := func(n *inode) *inode {
		if copies[n] == nil {
			k := *n
			k.pages, k.durable, k.dirty = slices.Clone(n.pages), slices.Clone(n.durable), map[int64]*dirtyPage{}
			k.zeroed = slices.Clone(n.zeroed)
			for index, d := range n.dirty {
				if d.set != 0 {
					k.dirty[index] = &dirtyPage{set: d.set, lost: d.lost}
				}
			}
			k.opens = 0
			copies[n] = &k
		}
		return copies[n]
	}
	for p, n := range d.names {
		c.names[p] = twin(n)
	}
	for p, n := range d.kept {
		c.kept[p] = twin(n)
	}
	for _, o := range d.dirOps {
		o.node = twin(o.node)
		c.dirOps = append(c.dirOps, o)
	}
	for _, n := range copies {
		if n.links > 0 {
			c.used += n.blocks * pageBytes
		}
	}
	return c
}

// Subsets yields the choices that a power-cut test tries for n pending items: all of them up to exhaustive items, beyond
// that none, every prefix, every suffix, every single hole, and seeded ones. The function it passes tells whether an item
// is kept.
func Subsets(n, exhaustive, seeded int, seed uint64) func(yield func(keep func(i int) bool) bool) {
	return func(yield func(func(int) bool) bool) {
		if n <= exhaustive {
			for mask := range uint64(1) << n {
				if !yield(func(i int) bool { return mask>>i&1 == 1 }) {
					return
				}
			}
			return
		}
		for k := range n + 1 {
			if !yield(func(i int) bool { return i < k }) || !yield(func(i int) bool { return i >= k }) {
				return
			}
		}
		for k := range n {
			if !yield(func(i int) bool { return i != k }) {
				return
			}
		}
		rng := rand.New(rand.NewPCG(seed, uint64(n)))
		for range seeded {
			bits := make([]bool, n)
			for i := range bits {
				bits[i] = rng.IntN(2) == 1
			}
			if !yield(func(i int) bool { return bits[i] }) {
				return
			}
		}
	}
}
