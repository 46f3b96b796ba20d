package ring

// Kind names what an Op asks of the disk.
type Kind uint8

// Data operations go through io_uring where it is available. File-system operations (Open and below) are rare and
// block for long, so every backend runs them on a small pool of worker goroutines and hands the result back through the
// owner's completion queue like any other.
const (
	// Read fills Buf from Off. N is smaller than len(Buf) only where the file ends.
	Read Kind = iota + 1
	// Write puts the whole of Buf at Off; a short write is continued. Not durable on completion.
	Write
	// WriteSync is Write whose data (and the metadata needed to read it) is durable on completion (RWF_DSYNC).
	WriteSync
	// Sync is fdatasync of FD.
	Sync
	// Open opens Path with Flags; the result is FD.
	Open
	// Close closes FD.
	Close
	// Allocate is fallocate(FD, Off, Size): blocks are reserved, the file grows to at least Off+Size.
	Allocate
	// Truncate sets the file's length to Size.
	Truncate
	// Rename moves Path to Path2, replacing it.
	Rename
	// Remove unlinks Path (a file or an empty directory). A missing path is an error (fs.ErrNotExist).
	Remove
	// Mkdir creates Path and its missing parents (mode 0o750).
	Mkdir
	// SyncDir makes the directory entries of Path durable.
	SyncDir
	// ReadDir lists Path into Names (sorted, no "." or "..").
	ReadDir
	// Stat sets Size to the length of Path, or of FD where Path is empty.
	Stat
	// Cached sets Size to how many of the Size bytes of FD from Off on are in the page cache: all of them where some are
	// not written back, or where the kernel doesn't tell (before Linux 6.5). It runs on the owner's thread, inside the next
	// Poll or Wait, and doesn't block.
	Cached
	// Uncache takes Size bytes of FD from Off on, or all of them where Size is 0, out of the page cache, but for what is not
	// written back. It is advice, which the kernel may ignore. It runs where Cached does.
	Uncache
	// StatFS sets Size to the bytes available to an unprivileged writer on the file system that holds Path.
	StatFS
)

// OpenFlags selects how Open opens a file. A file is always opened for reading and writing unless ReadOnly is set.
type OpenFlags uint8

const (
	// ReadOnly opens without write permission.
	ReadOnly OpenFlags = 1 << iota
	// Create creates a missing file (mode 0o640).
	Create
	// Exclusive, with Create, fails with fs.ErrExist where the file exists.
	Exclusive
	// Direct asks for O_DIRECT. Buf, Off and len(Buf) of every later Read and Write must then be multiples of
	// BlockSize. Where the file system refuses O_DIRECT the file is opened without it and Op.Direct tells so.
	Direct
)

// BlockSize is the alignment in bytes of direct I/O, of slabs and of journal rounds.
const BlockSize = 4096

// Op is one disk operation. Its owner allocates it, fills it in, submits it and may reuse it after Done ran. From
// Submit until Done the backend (and for Buf the kernel) owns the Op: neither may be touched. Buf of a data operation
// must be off-heap memory (a Slab): the kernel writes to it behind the garbage collector's back.
type Op struct {
	Kind  Kind
	Flags OpenFlags
	// FD is the file for data operations, the result of Open.
	FD int
	// Off is the byte offset in the file.
	Off int64
	// Size is the length for Allocate, Truncate and Uncache, the result of Stat and StatFS, both for Cached, in bytes.
	Size int64
	Buf  []byte
	// Inline has a data operation run as a plain system call, on the owner's thread, inside the next Poll or Wait, which
	// blocks for it. For a small flush that the owner would only wait for, that is quicker than io_uring, where the
	// completion takes two more threads: the kernel's worker that flushes, and the waker of the owner.
	Inline bool
	Path   string
	Path2  string

	// Done runs on the goroutine that drives the disk (inside Wait or Poll), once per Submit. Set it once, not per
	// operation: a bound method value allocates.
	Done func(*Op)
	// Tag is the owner's and left alone by the backend.
	Tag uint64

	// N is the number of bytes read or written.
	N int
	// Err is nil or an *OpError, which unwraps to the errno.
	Err error
	// Direct tells after Open whether O_DIRECT is in force.
	Direct bool
	// Names is the result of ReadDir.
	Names []string

	// The backend's own state: done counts the bytes transferred so far, tries the attempts that an interruption ended,
	// next links the list the operation waits in, busy is set from Submit until Done.
	done  int
	tries int
	next  *Op
	busy  bool
}
