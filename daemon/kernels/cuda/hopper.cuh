// The instructions of Hopper (sm_90) that the fast kernel is made of, one function each.
#pragma once

namespace tqd {

// Four bytes of the eight in a and b, by the nibbles of s; a nibble with its top bit set replicates a byte's sign.
__device__ __forceinline__ u32 permute_bytes(u32 a, u32 b, u32 s) {
  u32 r;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(s));
  return r;
}

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
  u32 r;
  asm("mad.lo.u32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// c (16×8, int32) += a (16×32, signed bytes) · b (32×8, signed or unsigned bytes). Lane 4g + c holds rows g and g + 8.
__device__ __forceinline__ void mma_signed(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_unsigned(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// True for one lane of the warp, always the same one; the compiler knows that it is one.
__device__ __forceinline__ bool is_leader() {
  u32 leads;
  asm volatile("{ .reg .pred p; elect.sync _|p,0xffffffff; selp.u32 %0,1,0,p; }" : "=r"(leads));
  return leads;
}

// The largest number of a warp, in fewer steps than warp_max. Of NaN it may be one.
__device__ __forceinline__ float warp_most(float x) {
  const int bits = __float_as_int(x), order = bits ^ (bits >> 31 & 0x7fffffff);  // integers in the order of the floats
  const int most = __reduce_max_sync(ALL, order);
  return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(barrier));
}
__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
  u32 done = 0;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
  } while (!done);
}

// For copies of what nobody reads again before it has left the L2 cache: it leaves first.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}

// Starts copying `bytes` of global memory to shared memory; `barrier` flips when they are there.
__device__ __forceinline__ void copy_to_shared(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Registers of each thread from here on, for the whole group of four warps that says so.
template <int COUNT>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Adds one to `counter` and returns what it was, ordered after and before everything around it on the whole GPU.
__device__ __forceinline__ u32 count_up(u32* counter) {
  u32 was;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0,[%1],1;" : "=r"(was) : "l"(counter) : "memory");
  return was;
}

// Floats at which an integer from -2^22 to 2^22 can be read off the low bits. With the second, the high half of a word
// made by `join` from two such floats is the second integer alone.
constexpr float ROUNDING = 12582912.f;               // 1.5 · 2^23 = 0x4b400000
constexpr float ROUNDING_HIGH = ROUNDING - 19264.f;  // 0x4b40

__device__ __forceinline__ u32 join(float low, float high, u32 two_to_16) {
  return multiply_add(__float_as_uint(high), two_to_16, __float_as_uint(low));
}

}  // namespace tqd
