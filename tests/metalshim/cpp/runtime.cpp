// Runs one launch of a compiled kernel: one OS thread, one threadgroup at a time, every GPU thread a fiber.
//
// A fiber runs until a rendezvous (barrier or SIMD-group function), leaves its operand in a slot and switches to the
// next ready fiber. Lanes that wait at different source lines are an error that names them, never a hang.
// A checked launch answers the compiler's memory callbacks (-fsanitize=thread, without its runtime) from a shadow of
// every byte: last writer, last readers, barrier epochs, initialized or not.
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kStack = 128 * 1024;
constexpr uint32_t kThreads = 1024;  // of a threadgroup, at most

enum State : uint8_t { READY, RUNNING, WAITS_FOR_SIMDGROUP, WAITS_FOR_GROUP, WAITS_FOR_EVENT, RETURNED };
enum Order { FORWARD, REVERSE, RANDOM };
enum Flags { GROUP_MEMORY = 1, DEVICE_MEMORY = 2 };

struct Fiber {
  void* stack;
  MslThread thread;
  State state;
  int kind, line;  // of the rendezvous that it waits at
  const void* event;
};

struct Simdgroup {
  uint32_t first, alive, size, arrived, parity;
  int kind, line;
  uint32_t group_epoch, device_epoch;  // advanced by simdgroup_barrier
  MslView view[2];                     // lanes may still read one while others fill the other
};

// What is known of one byte. Threads are numbered over the whole grid, from 1; 0 is nobody.
struct Shadow {
  uint32_t writer, writer_epoch, writer_simd_epoch;
  uint32_t reader, reader_epoch, reader_simd_epoch;
  uint32_t other_reader, other_reader_epoch;  // the last one of another SIMD-group than reader
  uint32_t writer_fence, reader_fence;  // fences of the whole device before the last write and read
  uint8_t initialized, zone;
};

struct {
  MslLaunch* launch;
  Fiber fiber[kThreads];
  Simdgroup simdgroup[32];
  uint32_t n_fibers, alive, waiting;  // waiting: at the threadgroup barrier
  int barrier_line, barrier_flags;
  uint32_t ready[kThreads], head, count, current;
  void* main_stack;
  char* stacks;
  uint64_t random;
  uint32_t group_index, group_epoch, device_epoch, fences;
  uint64_t serial;  // of the threadgroup, over all launches
  bool failed;
  Shadow* group_shadow;
  size_t group_shadow_size;
  Shadow* shadow[64];
} S;

}  // namespace

asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void msl_switch(void** save, void* to);

// ---------------------------------------------------------------- failing

static inline Fiber& self() { return S.fiber[S.current]; }

static void back_to_main() {
  void* unused;
  msl_switch(&unused, S.main_stack);
  __builtin_trap();
}

EXPORT void msl_fail(void* pc, const char* format, ...) {
  if (!S.failed) {
    char* text = S.launch->error;
    size_t room = S.launch->error_bytes;
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(text, room, format, arguments);
    va_end(arguments);
    const MslThread& t = self().thread;
    snprintf(text + n, room - n, " [threadgroup (%u,%u,%u) thread %u = simdgroup %u lane %u]", t.group[0], t.group[1],
             t.group[2], t.index_in_group, t.simdgroup, t.lane);
    S.launch->error_pc = pc;
    S.failed = true;
  }
  back_to_main();
}

static const char* kind_name(int kind) {
  static const char* names[] = {"?",
                                "threadgroup_barrier",
                                "simdgroup_barrier",
                                "simd reduction",
                                "simd_shuffle",
                                "simd_broadcast",
                                "simd prefix sum",
                                "simd vote",
                                "matrix product",
                                "election",
                                "named barrier",
                                "mbarrier"};
  return names[kind];
}

static void fail_divergence() {
  char text[1024];
  int n = 0;
  uint32_t shown = 0;
  Fiber* last = nullptr;
  for (uint32_t i = 0; i < S.n_fibers && shown < 6; i++) {
    Fiber& f = S.fiber[i];
    if (last && last->state == f.state && last->line == f.line && last->kind == f.kind) continue;
    last = &f;
    shown++;
    if (f.state == RETURNED)
      n += snprintf(text + n, sizeof text - n, "; thread %u.. has returned", i);
    else
      n += snprintf(text + n, sizeof text - n, "; thread %u.. waits at %s line %d", i, kind_name(f.kind), f.line);
  }
  msl_fail(nullptr, "DIVERGENCE: lanes wait at different rendezvous points%s", text);
}

// ---------------------------------------------------------------- scheduling

static inline void push(uint32_t i) {
  S.fiber[i].state = READY;
  S.ready[(S.head + S.count++) % kThreads] = i;
}

static inline uint32_t pop() {
  uint32_t k = 0;
  if (S.launch->order == REVERSE) k = S.count - 1;
  if (S.launch->order == RANDOM) {
    S.random = S.random * 6364136223846793005ull + 1442695040888963407ull;
    k = (uint32_t)(S.random >> 33) % S.count;
  }
  uint32_t at = (S.head + k) % kThreads, i = S.ready[at];
  if (k == 0)
    S.head = (S.head + 1) % kThreads;
  else
    S.ready[at] = S.ready[(S.head + S.count - 1) % kThreads];
  S.count--;
  return i;
}

static void run_another() {
  if (!S.count) fail_divergence();
  uint32_t next = pop(), me = S.current;
  S.fiber[next].state = RUNNING;
  if (next == me) return;
  S.current = next;
  S.launch->switches++;
  msl_switch(&S.fiber[me].stack, S.fiber[next].stack);
}

static void release_group() {
  for (uint32_t i = 0; i < S.n_fibers; i++)
    if (S.fiber[i].state == WAITS_FOR_GROUP) push(i);
  S.waiting = 0;
  if (S.barrier_flags & GROUP_MEMORY) S.group_epoch++;
  if (S.barrier_flags & DEVICE_MEMORY) S.device_epoch++;
}

static void release_simdgroup(Simdgroup& g) {
  for (uint32_t i = g.first; i < g.first + g.size; i++)
    if (S.fiber[i].state == WAITS_FOR_SIMDGROUP) push(i);
  g.arrived = 0;
  g.parity ^= 1;
}

static void fiber_main() {
  S.launch->entry(S.launch->args, &self().thread);
  Fiber& f = self();
  f.state = RETURNED;
  S.alive--;
  Simdgroup& g = S.simdgroup[f.thread.simdgroup];
  g.alive--;
  if (S.waiting)
    msl_fail(nullptr, "DIVERGENCE: thread returned while others wait at threadgroup_barrier line %d", S.barrier_line);
  if (g.arrived && g.arrived == g.alive) release_simdgroup(g);
  if (!S.alive) back_to_main();
  run_another();
  __builtin_trap();
}

EXPORT MslThread* msl_thread() { return &self().thread; }

EXPORT void msl_group_barrier(int flags, int line) {
  Fiber& f = self();
  if (S.alive != S.n_fibers)
    msl_fail(nullptr, "DIVERGENCE: threadgroup_barrier line %d reached after %u thread(s) returned", line,
             S.n_fibers - S.alive);
  if (S.waiting && S.barrier_line != line)
    msl_fail(nullptr, "DIVERGENCE: threadgroup_barrier line %d here, but %u thread(s) wait at the barrier of line %d",
             line, S.waiting, S.barrier_line);
  S.barrier_line = line;
  S.barrier_flags = flags;
  f.kind = MSL_BARRIER;
  f.line = line;
  S.launch->barriers++;
  if (++S.waiting == S.alive) {
    release_group();
    if (S.launch->order == FORWARD) return;  // the last to arrive goes on; in other orders it queues like everyone
    push(S.current);
  } else {
    f.state = WAITS_FOR_GROUP;
  }
  run_another();
}

EXPORT MslView* msl_simd(int kind, int line, const void* value, uint32_t bytes) {
  Fiber& f = self();
  Simdgroup& g = S.simdgroup[f.thread.simdgroup];
  MslView* view = &g.view[g.parity];
  if (!g.arrived) {
    g.kind = kind;
    g.line = line;
    view->mask = view->reduced = 0;
  } else if (g.kind != kind || g.line != line) {
    msl_fail(nullptr, "DIVERGENCE: %s line %d here, but %u lane(s) of this simdgroup wait at %s line %d",
             kind_name(kind), line, g.arrived, kind_name(g.kind), g.line);
  }
  if (bytes) memcpy(view->slot[f.thread.lane], value, bytes);
  view->mask |= 1u << f.thread.lane;
  f.kind = kind;
  f.line = line;
  if (++g.arrived == g.alive) {
    release_simdgroup(g);
    S.launch->simd_operations++;
    if (S.launch->order == FORWARD) return view;
    push(S.current);
  } else {
    f.state = WAITS_FOR_SIMDGROUP;
  }
  run_another();
  return view;
}

EXPORT void msl_simd_barrier(int flags, int line) {
  MslView* view = msl_simd(MSL_SIMD_BARRIER, line, nullptr, 0);
  if (view->reduced) return;
  view->reduced = 1;
  Simdgroup& g = S.simdgroup[self().thread.simdgroup];
  if (flags & GROUP_MEMORY) g.group_epoch++;
  if (flags & DEVICE_MEMORY) g.device_epoch++;
}

// ---------------------------------------------------------------- waiting for what is no rendezvous

EXPORT void msl_yield() {
  push(S.current);
  run_another();
}

EXPORT void msl_wait(const void* event, int kind, int line) {
  Fiber& f = self();
  f.state = WAITS_FOR_EVENT;
  f.event = event;
  f.kind = kind;
  f.line = line;
  run_another();
}

EXPORT void msl_notify(const void* event) {
  for (uint32_t i = 0; i < S.n_fibers; i++)
    if (S.fiber[i].state == WAITS_FOR_EVENT && S.fiber[i].event == event) push(i);
}

EXPORT uint64_t msl_serial() { return S.serial; }

EXPORT uint32_t msl_alive() { return S.alive; }

// The lane that leads where the machine chooses one: always the same, whichever it is.
EXPORT uint32_t msl_leader() {
  return S.launch->order == FORWARD ? 0 : S.launch->order == REVERSE ? 31 : S.launch->seed * 7 % 32;
}

// ---------------------------------------------------------------- checking memory

struct Place {
  bool device;
  const char* name;
  size_t at;  // byte
};

static bool conflicts(const Place& place, uint32_t other, uint32_t its_epoch, uint32_t its_simd_epoch,
                      uint32_t its_fence) {
  const MslThread& t = self().thread;
  const Simdgroup& g = S.simdgroup[t.simdgroup];
  uint32_t me = S.group_index * kThreads + t.index_in_group + 1;
  if (!other || other == me) return false;
  if ((other - 1) / kThreads != S.group_index) return place.device && its_fence == S.fences;
  if (its_epoch != (place.device ? S.device_epoch : S.group_epoch)) return false;
  bool same_simdgroup = ((other - 1) % kThreads) / 32 == t.simdgroup;
  return !same_simdgroup || its_simd_epoch == (place.device ? g.device_epoch : g.group_epoch);
}

static void touch_byte(Shadow& s, const Place& place, bool write, void* pc) {
  const MslThread& t = self().thread;
  const Simdgroup& g = S.simdgroup[t.simdgroup];
  uint32_t me = S.group_index * kThreads + t.index_in_group + 1;
  uint32_t epoch = place.device ? S.device_epoch : S.group_epoch;
  uint32_t simd_epoch = place.device ? g.device_epoch : g.group_epoch;
  if (s.zone) msl_fail(pc, "OUT OF BOUNDS %s of %s at byte %zu, past the end of an array", write ? "write" : "read", place.name, place.at);
  if (!write && !s.initialized) msl_fail(pc, "UNINITIALIZED read of %s at byte %zu", place.name, place.at);
  if (conflicts(place, s.writer, s.writer_epoch, s.writer_simd_epoch, s.writer_fence))
    msl_fail(pc, "RACE: %s of %s byte %zu conflicts with a write by thread %u of threadgroup #%u, no barrier between",
             write ? "write" : "read", place.name, place.at, (s.writer - 1) % kThreads, (s.writer - 1) / kThreads);
  if (write) {
    if (conflicts(place, s.reader, s.reader_epoch, s.reader_simd_epoch, s.reader_fence) ||
        conflicts(place, s.other_reader, s.other_reader_epoch, 0xffffffffu, s.reader_fence))
      msl_fail(pc, "RACE: write of %s byte %zu conflicts with a read by thread %u, no barrier between", place.name,
               place.at, (s.reader - 1) % kThreads);
    s.writer = me;
    s.writer_epoch = epoch;
    s.writer_simd_epoch = simd_epoch;
    s.writer_fence = S.fences;
    s.initialized = 1;
    return;
  }
  if (s.reader && s.reader_epoch == epoch && (s.reader - 1) / 32 != (me - 1) / 32) {
    s.other_reader = s.reader;
    s.other_reader_epoch = s.reader_epoch;
  }
  s.reader = me;
  s.reader_epoch = epoch;
  s.reader_simd_epoch = simd_epoch;
  s.reader_fence = S.fences;
}

static void touch(Shadow* shadow, Place place, uint32_t bytes, bool write, void* pc) {
  for (uint32_t i = 0; i < bytes; i++, place.at++) touch_byte(shadow[i], place, write, pc);
}

static void check(void* address, uint32_t bytes, bool write, void* pc) {
  MslLaunch* L = S.launch;
  char* p = (char*)address;
  if (!L || !L->check || S.failed) return;
  if ((size_t)(p - S.stacks) < kStack * kThreads) return;
  if ((size_t)(p - L->group_memory) < L->group_memory_bytes) {
    size_t at = p - L->group_memory;
    touch(S.group_shadow + at, {false, "threadgroup memory", at}, bytes, write, pc);
    return;
  }
  if ((size_t)(p - L->arena) >= L->arena_bytes) return;  // constants of the program
  const MslRegion* nearest = nullptr;
  long distance = 0;
  for (uint32_t i = 0; i < L->n_regions; i++) {
    MslRegion& r = L->regions[i];
    size_t at = p - r.base;
    if (at < r.bytes && at + bytes <= r.bytes) {
      if (write && !r.writable) msl_fail(pc, "WRITE to read-only buffer '%s'", r.name);
      if (r.writable) touch(S.shadow[i] + at, {true, r.name, at}, bytes, write, pc);
      return;
    }
    long d = p < r.base ? p - r.base : p - (r.base + r.bytes);
    if (!nearest || labs(d) < labs(distance)) {
      nearest = &r;
      distance = d;
    }
  }
  msl_fail(pc, "OUT OF BOUNDS %s of %u bytes: nearest buffer '%s' has %zu bytes, offset %ld", write ? "write" : "read",
           bytes, nearest ? nearest->name : "?", nearest ? nearest->bytes : 0, distance);
}

// What was written before is seen by the threads that meet here; *everywhere*: by whichever threadgroup comes after.
EXPORT void msl_synchronized(int everywhere) {
  S.group_epoch++;
  S.device_epoch++;
  S.fences += everywhere != 0;
}

EXPORT void msl_touch(void* address, size_t bytes, int write, void* pc) {
  check(address, (uint32_t)bytes, write != 0, pc);
}

// Bytes of threadgroup memory that a copy engine has written, not a thread.
EXPORT void msl_arrived(char* to, size_t bytes) {
  if (!S.launch->check) return;
  for (size_t i = 0; i < bytes; i++) {
    Shadow& s = S.group_shadow[to - S.launch->group_memory + i];
    s.writer = 0;
    s.initialized = 1;
  }
}

EXPORT void msl_zone(char* zone, size_t bytes) {
  if (!S.launch->check) return;
  for (size_t i = 0; i < bytes; i++) S.group_shadow[zone - S.launch->group_memory + i].zone = 1;
}

#define READ(name, n) \
  EXPORT void __tsan_##name(void* a) { check(a, n, false, __builtin_return_address(0)); }
#define WRITE(name, n) \
  EXPORT void __tsan_##name(void* a) { check(a, n, true, __builtin_return_address(0)); }
#define READ_WRITE(name, n)                          \
  EXPORT void __tsan_##name(void* a) {               \
    check(a, n, false, __builtin_return_address(0)); \
    check(a, n, true, __builtin_return_address(0));  \
  }
#define CALLBACKS(n)           \
  READ(read##n, n)             \
  WRITE(write##n, n)           \
  READ_WRITE(read_write##n, n) \
  READ(unaligned_read##n, n)   \
  WRITE(unaligned_write##n, n) \
  READ_WRITE(unaligned_read_write##n, n)
CALLBACKS(1)
CALLBACKS(2)
CALLBACKS(4)
CALLBACKS(8)
CALLBACKS(16)
EXPORT void __tsan_init() {}
EXPORT void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check((void*)from, n, false, __builtin_return_address(0));
  check(to, n, true, __builtin_return_address(0));
  return memmove(to, from, n);
}
EXPORT void* __tsan_memmove(void* to, const void* from, size_t n) { return __tsan_memcpy(to, from, n); }
EXPORT void* __tsan_memset(void* to, int value, size_t n) {
  check(to, n, true, __builtin_return_address(0));
  return memset(to, value, n);
}

// ---------------------------------------------------------------- undefined behaviour: -fsanitize's handlers, our own

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(name, text)                                                  \
  EXPORT void __ubsan_handle_##name(void* data) {                              \
    SourceLocation* at = (SourceLocation*)data;                                \
    msl_fail(nullptr, "UB: %s at line %u col %u", text, at->line, at->column); \
  }
UNDEFINED(out_of_bounds, "array index out of bounds")
UNDEFINED(shift_out_of_bounds, "shift amount out of range")
UNDEFINED(divrem_overflow, "integer division by zero or overflow")
UNDEFINED(float_cast_overflow, "float to int cast out of range")
UNDEFINED(type_mismatch_v1, "misaligned or null access")

// ---------------------------------------------------------------- guard pages

static void* fault_address;
static int fault_signal;

static void fail_fault() {
  void* pc = (char*)S.launch->error_pc + 1;  // as if it returned there
  if (fault_signal == SIGFPE) msl_fail(pc, "SIGFPE: integer division by zero");
  if (fault_signal == SIGILL) msl_fail(pc, "SIGILL: undefined behaviour that the compiler made a trap");
  msl_fail(pc, "SIGSEGV: access to guard page or wild pointer %p (out-of-bounds device access?)", fault_address);
}

static void on_fault(int signal_number, siginfo_t* info, void* context) {
  ucontext_t* uc = (ucontext_t*)context;
  fault_address = info->si_addr;
  fault_signal = signal_number;
  if ((size_t)((char*)uc->uc_mcontext.gregs[REG_RSP] - S.stacks) >= kStack * kThreads) {
    signal(signal_number, SIG_DFL);  // not in a kernel: the interpreter's own fault
    return;
  }
  S.launch->error_pc = (void*)uc->uc_mcontext.gregs[REG_RIP];
  uc->uc_mcontext.gregs[REG_RSP] = ((uint64_t)(S.stacks + (S.current + 1) * kStack) & ~15ull) - 8;
  uc->uc_mcontext.gregs[REG_RIP] = (greg_t)&fail_fault;
}

EXPORT char* msl_arena(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : (char*)p;
}
EXPORT int msl_commit(char* p, size_t n) { return mprotect(p, n, PROT_READ | PROT_WRITE); }
EXPORT int msl_release(char* p, size_t n) {
  madvise(p, n, MADV_DONTNEED);
  return mprotect(p, n, PROT_NONE);
}

// ---------------------------------------------------------------- launching

static void begin_check(MslLaunch* L) {
  if (S.group_shadow_size < L->group_memory_bytes) {
    free(S.group_shadow);
    S.group_shadow_size = L->group_memory_bytes;
    S.group_shadow = (Shadow*)malloc(S.group_shadow_size * sizeof(Shadow));
  }
  for (uint32_t i = 0; i < L->n_regions; i++) {
    MslRegion& r = L->regions[i];
    S.shadow[i] = r.writable ? (Shadow*)calloc(r.bytes + 1, sizeof(Shadow)) : nullptr;
    for (size_t b = 0; r.writable && r.initialized && b < r.bytes; b++) S.shadow[i][b].initialized = 1;
  }
}

static void end_check(MslLaunch* L) {
  for (uint32_t i = 0; i < L->n_regions; i++) {
    if (!S.shadow[i]) continue;
    for (size_t b = 0; b < L->regions[i].bytes; b++) L->regions[i].unwritten += !S.shadow[i][b].initialized;
    free(S.shadow[i]);
    S.shadow[i] = nullptr;
  }
}

static void set_up_fiber(uint32_t i, const uint32_t* size, const uint32_t* group, const uint32_t* groups) {
  MslLaunch* L = S.launch;
  Fiber& f = S.fiber[i];
  MslThread& t = f.thread;
  uint32_t position[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
  for (int d = 0; d < 3; d++) {
    t.in_group[d] = position[d];
    t.group[d] = group[d];
    t.in_grid[d] = group[d] * L->group[d] + position[d];
    t.groups[d] = groups[d];
    t.grid[d] = L->grid[d];
    t.group_size[d] = size[d];
    t.full_group_size[d] = L->group[d];
  }
  t.index_in_group = i;
  t.lane = i % 32;
  t.simdgroup = i / 32;
  t.simdgroups = (S.n_fibers + 31) / 32;
  t.full_simdgroups = (L->group[0] * L->group[1] * L->group[2] + 31) / 32;
  void** top = (void**)((uint64_t)(S.stacks + (i + 1) * kStack) & ~63ull);
  *--top = nullptr;
  *--top = (void*)fiber_main;
  for (int saved_register = 0; saved_register < 6; saved_register++) *--top = nullptr;
  f.stack = top;
  push(i);
}

static void run_group(const uint32_t* group, const uint32_t* groups) {
  MslLaunch* L = S.launch;
  S.serial++;
  uint32_t size[3];  // the last threadgroup of an axis is smaller
  for (int d = 0; d < 3; d++) {
    uint32_t rest = L->grid[d] - group[d] * L->group[d];
    size[d] = rest < L->group[d] ? rest : L->group[d];
  }
  S.n_fibers = S.alive = size[0] * size[1] * size[2];
  S.waiting = S.head = S.count = 0;
  if (L->group_memory_bytes) memset(L->group_memory, L->poison, L->group_memory_bytes);
  if (L->check) memset(S.group_shadow, 0, L->group_memory_bytes * sizeof(Shadow));
  for (uint32_t first = 0; first < S.n_fibers; first += 32) {
    Simdgroup& g = S.simdgroup[first / 32];
    g.first = first;
    g.size = g.alive = S.n_fibers - first < 32 ? S.n_fibers - first : 32;
    g.arrived = g.parity = 0;
  }
  for (uint32_t i = 0; i < S.n_fibers; i++) set_up_fiber(i, size, group, groups);
  S.current = pop();
  S.fiber[S.current].state = RUNNING;
  msl_switch(&S.main_stack, S.fiber[S.current].stack);
}

// Runs the whole grid, or up to the first error, whose text is then in launch->error; returns whether there was one.
EXPORT int msl_launch(MslLaunch* L) {
  if (!S.stacks)
    S.stacks = (char*)mmap(nullptr, kStack * kThreads, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  S.launch = L;
  S.failed = false;
  S.random = L->seed * 2654435761u + 1;
  S.group_epoch = S.device_epoch = S.fences = 1;
  L->error_pc = nullptr;
  static char signal_stack[65536];
  stack_t stack{}, old_stack{};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &old_stack);
  const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  struct sigaction action{}, old[4];
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 4; i++) sigaction(signals[i], &action, &old[i]);
  if (L->check) begin_check(L);
  const uint32_t control = __builtin_ia32_stmxcsr();
  if (L->flush) __builtin_ia32_ldmxcsr(control | 0x8040);

  uint32_t groups[3];
  for (int d = 0; d < 3; d++) groups[d] = (L->grid[d] + L->group[d] - 1) / L->group[d];
  uint32_t total = groups[0] * groups[1] * groups[2];
  for (uint32_t n = 0; n < total && !S.failed; n++) {
    uint32_t i = S.group_index = L->order == REVERSE ? total - 1 - n : n;
    uint32_t group[3] = {i % groups[0], i / groups[0] % groups[1], i / groups[0] / groups[1]};
    run_group(group, groups);
  }

  __builtin_ia32_ldmxcsr(control);
  if (L->check) end_check(L);
  for (int i = 0; i < 4; i++) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  S.launch = nullptr;
  return S.failed;
}
