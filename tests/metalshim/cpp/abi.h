// What a compiled kernel, the runtime and launch.py agree on. launch.py mirrors the structs in ctypes.
#pragma once
#include <stddef.h>
#include <stdint.h>

// The position of one GPU thread; three numbers are x, y, z.
struct MslThread {
  uint32_t in_grid[3], in_group[3], group[3], groups[3], grid[3], group_size[3], full_group_size[3];
  uint32_t index_in_group, lane, simdgroup, simdgroups, full_simdgroups;
};

// One rendezvous of a SIMD-group: the operands of the lanes that take part.
struct MslView {
  uint32_t mask, reduced;
  alignas(16) char slot[32][128];
  alignas(16) char result[128];
};

struct MslRegion {
  char* base;
  size_t bytes;
  const char* name;
  uint32_t writable, initialized;
  size_t unwritten;  // set by a checked launch
};

struct MslLaunch {
  void (*entry)(void**, const MslThread*);
  void** args;
  uint32_t grid[3], group[3];
  uint64_t seed;
  int32_t order, check, poison, flush;  // flush: of denormal numbers
  char* group_memory;
  size_t group_memory_bytes;
  char* arena;
  size_t arena_bytes;
  MslRegion* regions;
  uint32_t n_regions;
  char* error;
  size_t error_bytes;
  void* error_pc;
  uint64_t switches, barriers, simd_operations;
};

enum MslKind { MSL_BARRIER = 1, MSL_SIMD_BARRIER, MSL_REDUCE, MSL_SHUFFLE, MSL_BROADCAST, MSL_SCAN, MSL_VOTE,
               MSL_MATRIX, MSL_ELECTION, MSL_NAMED_BARRIER, MSL_MBARRIER };

extern "C" {
MslView* msl_simd(int kind, int line, const void* value, uint32_t bytes);
void msl_group_barrier(int flags, int line);
void msl_simd_barrier(int flags, int line);
MslThread* msl_thread();
void msl_zone(char* zone, size_t bytes);  // no thread may touch it
void msl_yield();
void msl_wait(const void* event, int kind, int line);
void msl_notify(const void* event);
uint64_t msl_serial();  // of the threadgroup, over all launches
uint32_t msl_alive();   // threads of the threadgroup that have not returned
uint32_t msl_leader();  // a lane
void msl_synchronized(int everywhere);
void msl_touch(void* address, size_t bytes, int write, void* pc);
void msl_arrived(char* to, size_t bytes);
void msl_fail(void* pc, const char* format, ...);
}
