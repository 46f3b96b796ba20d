//go:build !race

package ledger

const raceBuild = false
