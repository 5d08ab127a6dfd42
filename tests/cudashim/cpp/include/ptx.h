// The PTX instructions that our kernels use (PTX ISA 8.x), one function each; ptx.py writes the calls.
#pragma once

namespace ptx {

struct Nowhere {};
constexpr Nowhere nowhere{};

inline void ex2_approx_ftz_f32(float& to, float x) { to = shim::flushed(shim::rough(exp2f(shim::flushed(x)), 2)); }
// Absolute errors of 2^-20.5 within [-π, π]
inline void sin_approx_ftz_f32(float& to, float x) { to = shim::rough(sinf(shim::flushed(x)), 4); }
inline void cos_approx_ftz_f32(float& to, float x) { to = shim::rough(cosf(shim::flushed(x)), 4); }

inline void prmt_b32(uint32_t& to, uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t all = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15, byte = (uint32_t)(bytes >> 8 * (nibble & 7)) & 255;
    all |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  to = all;
}
inline void mad_lo_u32(uint32_t& to, uint32_t a, uint32_t b, uint32_t c) { to = a * b + c; }
inline void selp_u32(uint32_t& to, uint32_t a, uint32_t b, bool p) { to = p ? a : b; }

// ---------------------------------------------------------------- matrix products

struct Matrices {
  uint32_t a[4], b[2];
};

// D (16×8) = A (16×32, signed) · B (32×8) + C. Lane 4g + c holds rows g and g + 8 of A and D, and column g of B.
template <class B>
inline void product(int* d, const Matrices& own, const int* c, int line) {
  const MslView* view = shim::meet(MSL_MATRIX, 0xffffffffu, &own, sizeof own, line);
  const unsigned lane = msl_thread()->lane, g = lane / 4, column = 2 * (lane % 4);
  for (int half = 0; half < 2; ++half)
    for (int j = 0; j < 2; ++j) {
      uint32_t sum = (uint32_t)c[2 * half + j];
      for (int four = 0; four < 8; ++four) {  // of the 32 products
        const int8_t* a = (const int8_t*)view->slot[4 * g + four % 4] + 4 * (half + four / 4 * 2);
        const B* b = (const B*)view->slot[4 * (column + j) + four % 4] + 16 + four / 4 * 4;
        for (int i = 0; i < 4; ++i) sum += (uint32_t)((int)a[i] * (int)b[i]);
      }
      d[2 * half + j] = (int)sum;
    }
}

#define PTX_PRODUCT(name, B)                                                                                           \
  inline void name(int& d0, int& d1, int& d2, int& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, \
                   uint32_t b1, int c0, int c1, int c2, int c3, int line = __builtin_LINE()) {                          \
    int d[4];                                                                                                          \
    const int c[4] = {c0, c1, c2, c3};                                                                                 \
    product<B>(d, {{a0, a1, a2, a3}, {b0, b1}}, c, line);                                                              \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                        \
  }
PTX_PRODUCT(mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, int8_t)
PTX_PRODUCT(mma_sync_aligned_m16n8k32_row_col_s32_s8_u8_s32, uint8_t)

// ---------------------------------------------------------------- a warp and a block

inline void elect_sync(Nowhere, bool& leads, uint32_t mask, int line = __builtin_LINE()) {
  shim::meet(MSL_ELECTION, mask, nullptr, 0, line);
  leads = msl_thread()->lane == msl_leader();
}
inline void setmaxnreg_inc_sync_aligned_u32(int, int line = __builtin_LINE()) { msl_simd_barrier(0, line); }
inline void setmaxnreg_dec_sync_aligned_u32(int, int line = __builtin_LINE()) { msl_simd_barrier(0, line); }

// What a block has besides its memory; anew for each.
struct Copy {
  char* to;
  const char* from;
  uint32_t bytes;
  struct Mbarrier* barrier;
};
struct Mbarrier {  // eight bytes of shared memory; hardware keeps the same, in an order of its own
  uint16_t magic;
  uint8_t phase, missing;  // arrivals
  int32_t bytes;           // that have not come yet
};
constexpr uint16_t MAGIC = 0xba55;
struct BlockState {
  uint64_t serial;
  uint32_t arrived[16], expected[16], round[16];  // of named barriers
  Copy copies[1024];
  uint32_t n_copies, tries;
};
inline BlockState& block() {
  static BlockState state;
  if (state.serial != msl_serial()) {
    state = {};
    state.serial = msl_serial();
  }
  return state;
}

inline bool arrives(uint32_t id, uint32_t threads, int line) {
  BlockState& all = block();
  if (id > 15 || threads % 32 || !threads) msl_fail(nullptr, "UB: barrier %u of %u threads, line %d", id, threads, line);
  if (all.arrived[id] && all.expected[id] != threads)
    msl_fail(nullptr, "DIVERGENCE: barrier %u is of %u threads, but of %u in line %d", id, all.expected[id], threads, line);
  all.expected[id] = threads;
  if (++all.arrived[id] < threads) return false;
  all.arrived[id] = 0;
  ++all.round[id];
  msl_synchronized(0);
  msl_notify(&all.round[id]);
  return true;
}
inline void bar_sync(uint32_t id, uint32_t threads, int line = __builtin_LINE()) {
  const uint32_t round = block().round[id & 15];
  if (arrives(id, threads, line)) return;
  while (block().round[id] == round) msl_wait(&block().round[id], MSL_NAMED_BARRIER, line);
}
inline void bar_arrive(uint32_t id, uint32_t threads, int line = __builtin_LINE()) { arrives(id, threads, line); }

// Relaxed or not, a fiber's access is seen by all; check runs want to know that it was meant to be.
__attribute__((no_sanitize("thread"))) inline void atom_add_acq_rel_gpu_global_u32(uint32_t& was, uint32_t* at, uint32_t x) {
  msl_synchronized(1);
  was = *at;
  *at = was + x;
}

// ---------------------------------------------------------------- copies by the machine

__attribute__((no_sanitize("thread"))) inline Mbarrier* mbarrier_at(uint32_t address, int line) {
  Mbarrier* barrier = (Mbarrier*)shim::shared_at(address, 8, 8, line);
  if (barrier->magic != MAGIC) msl_fail(nullptr, "UB: no mbarrier has been made at %u, line %d", address, line);
  return barrier;
}
__attribute__((no_sanitize("thread"))) inline void mbarrier_init_shared_cta_b64(uint32_t address, uint32_t arrivals,
                                                                               int line = __builtin_LINE()) {
  Mbarrier* barrier = (Mbarrier*)shim::shared_at(address, 8, 8, line);
  if (arrivals != 1) msl_fail(nullptr, "cudashim has mbarriers of one arrival only, line %d", line);
  *barrier = {MAGIC, 0, 1, 0};
}
__attribute__((no_sanitize("thread"))) inline void settle(Mbarrier* barrier) {
  if (barrier->missing || barrier->bytes) return;
  barrier->phase ^= 1;
  barrier->missing = 1;
}
__attribute__((no_sanitize("thread"))) inline void mbarrier_arrive_expect_tx_shared_cta_b64(Nowhere, uint32_t address,
                                                                                           uint32_t bytes,
                                                                                           int line = __builtin_LINE()) {
  Mbarrier* barrier = mbarrier_at(address, line);
  if (!barrier->missing) msl_fail(nullptr, "UB: a second arrival at the mbarrier %u in one phase, line %d", address, line);
  barrier->bytes += bytes;
  barrier->missing = 0;
  settle(barrier);
}

// A copy takes place when somebody waits for it, and not at once: what is read before is poison.
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(
    uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t, int line = __builtin_LINE()) {
  BlockState& all = block();
  char* target = shim::shared_at(to, bytes, 16, line);
  if (bytes % 16 || (size_t)from % 16)
    msl_fail(nullptr, "UB: a bulk copy of %u bytes from an address that ends in %zx, line %d", bytes, (size_t)from % 16, line);
  if (all.n_copies == 1024) msl_fail(nullptr, "cudashim has room for 1024 copies under way");
  for (uint32_t i = 0; i < bytes; i += 16) msl_touch(target + i, 16, 1, __builtin_return_address(0));
  memset(target, 0xff, bytes);
  all.copies[all.n_copies++] = {target, (const char*)from, bytes, mbarrier_at(barrier, line)};
}
__attribute__((no_sanitize("thread"))) inline bool land(Mbarrier* barrier) {
  BlockState& all = block();
  bool any = false;
  for (uint32_t i = 0; i < all.n_copies;) {
    Copy copy = all.copies[i];
    if (copy.barrier != barrier) {
      ++i;
      continue;
    }
    all.copies[i] = all.copies[--all.n_copies];
    memmove(copy.to, copy.from, copy.bytes);
    msl_arrived(copy.to, copy.bytes);
    barrier->bytes -= copy.bytes;
    any = true;
  }
  if (any) settle(barrier);
  return any;
}
__attribute__((no_sanitize("thread"))) inline void mbarrier_try_wait_parity_shared_cta_b64(bool& done, uint32_t address,
                                                                                          uint32_t parity,
                                                                                          int line = __builtin_LINE()) {
  constexpr uint32_t PATIENCE = 100'000'000;
  Mbarrier* barrier = mbarrier_at(address, line);
  done = barrier->phase != (parity & 1);
  if (done) {
    block().tries = 0;
    return;
  }
  if (++block().tries > PATIENCE) msl_fail(nullptr, "HANG: nothing comes for the mbarrier %u, line %d", address, line);
  msl_yield();
  if (barrier->phase == (parity & 1)) land(barrier);
}

inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}
inline void createpolicy_fractional_L2_evict_first_b64(unsigned long long& policy, float) { policy = 0; }

// What the entry calls after each thread's end.
inline void returned() {
  if (msl_alive() == 1 && block().n_copies)
    msl_fail(nullptr, "UB: the block ends with %u copies into its memory under way", block().n_copies);
}

}  // namespace ptx
