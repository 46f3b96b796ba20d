package wal

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/mortarmq/mortarmq/ring"
)

const (
	journalMagic   = "MMJL"
	journalVersion = 1
	markMagic      = "MMJM"
	markVersion    = 1

	// fileHeaderLen is the block at the start of a journal file; the first round follows it.
	fileHeaderLen = ring.BlockSize
	// fileHeaderUsed is how much of that block carries fields; the rest is zero.
	fileHeaderUsed = 48
	// maxFileBytes bounds a journal file.
	maxFileBytes = 4 << 30

	markSlotLen = ring.BlockSize
	markSlots   = 2
	markUsed    = 64
	markName    = "mark"

	journalPrefix = "journal-"
	journalSuffix = ".mmj"
	tmpSuffix     = ".tmp"
)

// journalFile is one file of a journal, open.
type journalFile struct {
	path   string
	number uint32
	fd     int
	size   int64
	// key stands in for the checksum while a round's checksum is computed; drawn when the file is made.
	key uint64
	// last is the newest round written to the file since it was last recycled; valid once the file is full.
	last RoundNumber
}

// payload returns how many bytes of rounds the file holds.
func (f *journalFile) payload() int64 { return f.size - fileHeaderLen }

func journalFileName(number uint32) string {
	return fmt.Sprintf("%s%06d%s", journalPrefix, number, journalSuffix)
}

// parseJournalFileName returns the number in a journal file's name.
func parseJournalFileName(name string) (number uint32, ok bool) {
	digits, ok := strings.CutPrefix(name, journalPrefix)
	if !ok {
		return 0, false
	}
	digits, ok = strings.CutSuffix(digits, journalSuffix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || n == 0 || journalFileName(uint32(n)) != name {
		return 0, false
	}
	return uint32(n), true
}

// putFileHeader encodes the header block of a journal file into b, which has fileHeaderLen bytes.
func putFileHeader(b []byte, journal int, f *journalFile) {
	clear(b[:fileHeaderLen])
	copy(b, journalMagic)
	b[4] = journalVersion
	binary.BigEndian.PutUint16(b[6:], uint16(journal))
	binary.BigEndian.PutUint32(b[8:], f.number)
	binary.BigEndian.PutUint64(b[16:], uint64(f.size))
	binary.BigEndian.PutUint64(b[24:], f.key)
	binary.BigEndian.PutUint64(b[40:], xxhash.Sum64(b[:40]))
}

var (
	errFileMagic    = errors.New("it does not start with the journal's magic " + journalMagic)
	errFileReserved = errors.New("reserved bytes of the header are not zero")
	errFileSize     = errors.New("the header's file size is out of range")
)

// decodeFileHeader reads the header block of the journal file at path. The version is looked at before anything that a
// newer one might have changed.
func decodeFileHeader(path string, b []byte, journal int, number uint32) (*journalFile, error) {
	corrupt := func(err error) error { return &CorruptionError{Path: path, Cause: err} }
	if string(b[:4]) != journalMagic {
		return nil, corrupt(errFileMagic)
	}
	sum := func(b []byte) error {
		if want, got := binary.BigEndian.Uint64(b[40:]), xxhash.Sum64(b[:40]); want != got {
			return &checksumError{want, got}
		}
		return nil
	}
	if b[4] > journalVersion {
		return nil, wrapFile(path, nil, newer(b, 4, journalVersion, sum))
	}
	if err := sum(b); err != nil {
		return nil, corrupt(err)
	}
	f := &journalFile{
		path:   path,
		number: binary.BigEndian.Uint32(b[8:]),
		size:   int64(binary.BigEndian.Uint64(b[16:])),
		key:    binary.BigEndian.Uint64(b[24:]),
	}
	id := int(binary.BigEndian.Uint16(b[6:]))
	switch {
	case b[4] == 0 || b[5] != 0 || !allZero(b[12:16]) || !allZero(b[32:40]) || !allZero(b[fileHeaderUsed:fileHeaderLen]):
		return nil, corrupt(errFileReserved)
	case id != journal:
		return nil, corrupt(fmt.Errorf("it belongs to journal %d, not %d", id, journal))
	case f.number != number:
		return nil, corrupt(fmt.Errorf("its header says file %d, its name %d", f.number, number))
	case f.size < fileHeaderLen+ring.BlockSize || f.size > maxFileBytes || f.size%ring.BlockSize != 0:
		return nil, corrupt(errFileSize)
	}
	return f, nil
}

// mark is what a slot of the mark file says: this round was durable.
type mark struct {
	generation uint64
	round      RoundNumber
	epoch      Epoch
	sum, nonce uint64
}

func putMark(b []byte, journal int, m *mark) {
	clear(b[:markSlotLen])
	copy(b, markMagic)
	b[4] = markVersion
	binary.BigEndian.PutUint16(b[6:], uint16(journal))
	binary.BigEndian.PutUint32(b[8:], uint32(m.epoch))
	binary.BigEndian.PutUint64(b[16:], m.generation)
	binary.BigEndian.PutUint64(b[24:], uint64(m.round))
	binary.BigEndian.PutUint64(b[32:], m.sum)
	binary.BigEndian.PutUint64(b[40:], m.nonce)
	binary.BigEndian.PutUint64(b[56:], xxhash.Sum64(b[:56]))
}

// decodeMark reads one slot. ok is false where it isn't a whole one: never written, torn or damaged.
func decodeMark(path string, b []byte, journal int) (m mark, ok bool, err error) {
	if string(b[:4]) != markMagic {
		return m, false, nil
	}
	if binary.BigEndian.Uint64(b[56:]) != xxhash.Sum64(b[:56]) {
		return m, false, nil
	}
	if b[4] > markVersion {
		return m, false, &VersionError{Path: path, Version: b[4], Supported: markVersion}
	}
	if int(binary.BigEndian.Uint16(b[6:])) != journal {
		return m, false, nil
	}
	return mark{
		generation: binary.BigEndian.Uint64(b[16:]),
		round:      RoundNumber(binary.BigEndian.Uint64(b[24:])),
		epoch:      Epoch(binary.BigEndian.Uint32(b[8:])),
		sum:        binary.BigEndian.Uint64(b[32:]),
		nonce:      binary.BigEndian.Uint64(b[40:]),
	}, true, nil
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

func systemRandom() uint64 {
	var b [8]byte
	// crypto/rand.Read never fails: the program ends where the system has no randomness.
	_, _ = rand.Read(b[:])
	return binary.BigEndian.Uint64(b[:])
}
