// Memory that the library asks the system for comes from the heap instead, where a sanitizer sees its ends; the linker
// is told to call these (`-Wl,--wrap`, see drivers.py). Included once by each driver.
#pragma once

#include <cstdlib>
#include <cstring>

extern "C" {
void* __wrap_mmap(void*, size_t bytes, int, int, int, long) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes)) abort();
  return memset(memory, 0, bytes);
}
int __wrap_munmap(void* memory, size_t) {
  free(memory);
  return 0;
}
int __wrap_madvise(void*, size_t, int) { return 0; }
}
