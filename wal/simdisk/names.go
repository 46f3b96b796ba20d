package simdisk

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/mortarmq/mortarmq/ring"
)

// dirOp is a change of the directories that no SyncDir has covered yet.
type dirOp struct {
	seq  uint64
	kind ring.Kind // Open (created), Mkdir, Rename, Remove
	path string
	// path2 is a rename's new name, node what was created or renamed.
	path2 string
	node  *inode
}

// dir returns the directory whose SyncDir makes the change durable.
func (o *dirOp) dir() string {
	if o.kind == ring.Rename {
		return path.Dir(o.path2)
	}
	return path.Dir(o.path)
}

func (o *dirOp) String() string {
	switch o.kind {
	case ring.Rename:
		return fmt.Sprintf("rename %s to %s", o.path, o.path2)
	case ring.Remove:
		return "remove " + o.path
	default:
		return "create " + o.path
	}
}

// do applies the change to a set of names.
func (o *dirOp) do(names map[string]*inode) {
	switch o.kind {
	case ring.Rename:
		if o.node.dir {
			moveAll(names, o.path, o.path2)
		}
		if names[o.path] == o.node {
			delete(names, o.path)
		}
		names[o.path2] = o.node
	case ring.Remove:
		if names[o.path] == o.node {
			delete(names, o.path)
		}
	default:
		names[o.path] = o.node
	}
}

// change makes a directory change visible and remembers that it isn't durable.
func (d *Disk) change(o dirOp) {
	d.seq++
	o.seq = d.seq
	o.do(d.names)
	d.dirOps = append(d.dirOps, o)
}

// applyName does the operations on names.
func (d *Disk) applyName(f *flight) error {
	op := f.op
	p := path.Clean(op.Path)
	switch op.Kind {
	case ring.Open:
		return d.open(op, p)
	case ring.Rename:
		return d.rename(p, path.Clean(op.Path2))
	case ring.Remove:
		return d.remove(p)
	case ring.Mkdir:
		return d.mkdir(p)
	case ring.SyncDir:
		return d.syncDir(p, f.seq)
	case ring.ReadDir:
		return d.readDir(op, p)
	case ring.StatFS:
		op.Size = unlimited
		if d.opts.CapacityBytes > 0 {
			op.Size = max(0, d.opts.CapacityBytes-d.used)
		}
		return nil
	default:
		return syscall.EINVAL
	}
}

func (d *Disk) isDir(p string) bool {
	if p == "/" || p == "." {
		return true
	}
	n := d.names[p]
	return n != nil && n.dir
}

func (d *Disk) open(op *ring.Op, p string) error {
	n := d.names[p]
	switch {
	case n != nil && n.dir || n == nil && d.isDir(p):
		return syscall.EISDIR
	case n != nil && op.Flags&ring.Create != 0 && op.Flags&ring.Exclusive != 0:
		return fs.ErrExist
	case n == nil && op.Flags&ring.Create == 0, n == nil && !d.isDir(path.Dir(p)):
		return fs.ErrNotExist
	case n == nil:
		d.inodes++
		n = newInode(d.inodes, false)
		n.links = 1
		d.change(dirOp{kind: ring.Open, path: p, node: n})
	}
	n.opens++
	op.Direct = op.Flags&ring.Direct != 0
	op.FD = d.nextFD
	d.files[op.FD] = &handle{node: n, path: p, readOnly: op.Flags&ring.ReadOnly != 0, direct: op.Direct}
	d.nextFD++
	return nil
}

func (d *Disk) stat(op *ring.Op) error {
	p := path.Clean(op.Path)
	if d.isDir(p) {
		op.Size = 0
		return nil
	}
	n := d.names[p]
	if n == nil {
		return fs.ErrNotExist
	}
	op.Size = n.size
	return nil
}

func (d *Disk) rename(from, to string) error {
	n := d.names[from]
	if n == nil || !d.isDir(path.Dir(to)) {
		return fs.ErrNotExist
	}
	if n.dir {
		return d.renameDir(n, from, to)
	}
	old := d.names[to]
	if old != nil && old.dir {
		return syscall.EISDIR
	}
	if old == n {
		return nil
	}
	if old != nil {
		old.links--
		d.reap(old)
	}
	d.change(dirOp{kind: ring.Rename, path: from, path2: to, node: n})
	for _, h := range d.files {
		if h.node == n {
			h.path = to
		}
	}
	return nil
}

// renameDir moves a directory with everything in it: that is one change, of the directory's own entry.
func (d *Disk) renameDir(n *inode, from, to string) error {
	if d.names[to] != nil {
		return fs.ErrExist
	}
	d.change(dirOp{kind: ring.Rename, path: from, path2: to, node: n})
	for _, h := range d.files {
		h.path = moved(h.path, from, to)
	}
	return nil
}

// moved returns what a path is called once the directory from is called to.
func moved(p, from, to string) string {
	if rest, inside := strings.CutPrefix(p, from+"/"); inside {
		return to + "/" + rest
	}
	return p
}

// moveAll renames everything in a directory.
func moveAll(names map[string]*inode, from, to string) {
	for _, p := range slices.Collect(maps.Keys(names)) {
		if m := moved(p, from, to); m != p {
			names[m] = names[p]
			delete(names, p)
		}
	}
}

func (d *Disk) remove(p string) error {
	n := d.names[p]
	switch {
	case n == nil:
		return fs.ErrNotExist
	case n.dir && len(d.children(p)) > 0:
		return syscall.ENOTEMPTY
	}
	n.links--
	d.change(dirOp{kind: ring.Remove, path: p, node: n})
	d.reap(n)
	return nil
}

func (d *Disk) mkdir(p string) error {
	if d.isDir(p) {
		return nil
	}
	if d.names[p] != nil {
		return syscall.ENOTDIR
	}
	if err := d.mkdir(path.Dir(p)); err != nil {
		return err
	}
	d.inodes++
	n := newInode(d.inodes, true)
	n.links = 1
	d.change(dirOp{kind: ring.Mkdir, path: p, node: n})
	return nil
}

// syncDir makes the changes of one directory durable that were made before it was submitted.
func (d *Disk) syncDir(p string, before uint64) error {
	if !d.isDir(p) {
		return fs.ErrNotExist
	}
	var renamed []dirOp
	d.dirOps = slices.DeleteFunc(d.dirOps, func(o dirOp) bool {
		if o.dir() != p || o.seq > before {
			return false
		}
		o.do(d.kept)
		if o.kind == ring.Rename && o.node.dir {
			renamed = append(renamed, o)
		}
		return true
	})
	// What happened in a directory before it was renamed, and is not durable, is a matter of the directory under its new name.
	for _, r := range renamed {
		for i := range d.dirOps {
			if o := &d.dirOps[i]; o.seq < r.seq {
				o.path, o.path2 = moved(o.path, r.path, r.path2), moved(o.path2, r.path, r.path2)
			}
		}
	}
	return nil
}

func (d *Disk) children(p string) []string {
	var c []string
	for name := range d.names {
		if under(p, name) {
			c = append(c, name)
		}
	}
	slices.Sort(c)
	return c
}

func (d *Disk) readDir(op *ring.Op, p string) error {
	if !d.isDir(p) {
		return fs.ErrNotExist
	}
	for _, c := range d.children(p) {
		op.Names = append(op.Names, path.Base(c))
	}
	return nil
}
