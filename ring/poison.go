//go:build poison

package ring

// poisonBuild makes every pool overwrite released slabs.
const poisonBuild = true
