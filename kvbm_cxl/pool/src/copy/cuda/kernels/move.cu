// SPDX-License-Identifier: Apache-2.0
//
// What a GPU runs to move lists of pieces between its memory and the mapped pool: gather, scatter and sparse are one thing to it. One
// launch moves any number of pieces of any length and alignment. `cxl_move_sum` also takes the sums of each 1024 bytes of each list, of the
// very bytes that it stores; `cxl_fold` makes of them the checksum of each list, XXH3-64 with seed 0, on another stream, while the next
// launch moves.
//
// The pieces of a call lie one behind the other in a stream, in which each list begins at a multiple of 1024. A warp takes 1024 bytes of
// the stream at a time, a chunk, and each of its lanes two units of 16 bytes: so loads overlap however short the pieces are. Memory is read
// in aligned words of 16 bytes, those at the ends of a piece with up to 15 bytes beside it; only bytes of pieces are written.
//
// Loads pass the caches of the GPU (`__ldcv`), because other hosts write the pool, and stores are written through (`__stwt`). What was
// stored is released to the whole system before the kernel ends.
//
// The same source is compiled for the CPU by the tests (kvbm_cxl/pool/tests/cuda/kernel), which have each of these functions of CUDA. The
// layout of the tables is that of table.rs.

typedef unsigned int u32;
typedef unsigned long long u64;

// A stretch to be moved.
struct Piece {
    u64 at; // its first byte in the stream; rises from piece to piece
    u64 len_bytes;
    u64 destination;
    u64 source;
};

// 1024 bytes of the stream.
struct Chunk {
    u32 piece; // that of its first byte
    u32 list;
};

// One block, whose checksum is taken.
struct List {
    u64 len_bytes; // more than 240: shorter ones have other sums
    u32 first_chunk;
    u32 chunks;
    u64 mark;
    u32 done; // chunks that were moved and summed; zero at the start
    u32 reserved;
};

// Where everything of a launch lies. `chunks` has one entry more than there are chunks, with the last piece.
struct Tables {
    u64 pieces;
    u64 chunks;
    u64 lists;
    u64 tails;   // 64 bytes for each list: its last ones
    u64 sums;    // 64 bytes for each chunk
    u64 results; // in memory of the host, 16 bytes for each list: its checksum and its mark
    u32 chunk_count;
    u32 list_count;
};

#define CHUNK_BYTES 1024
#define UNIT_BYTES 16
#define STRIPE_BYTES 64
#define WARP_LANES 32
#define ALL_LANES 0xffffffffu

// XXH3's default secret and constants, as of the specification.
__device__ const u64 SECRET[24] = {0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
                                   0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
                                   0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
                                   0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
                                   0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
__device__ const u64 START[8] = {0x00000000c2b2ae3d, 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9,
                                 0x85ebca77c2b2ae63, 0x0000000085ebca77, 0x27d4eb2f165667c5, 0x000000009e3779b1};

// Eight bytes of the secret from any byte on that is no multiple of eight.
__device__ __forceinline__ u64 secret_at(u32 byte) {
    u32 shift = byte % 8 * 8;
    return SECRET[byte / 8] >> shift | SECRET[byte / 8 + 1] << (64 - shift);
}

__device__ __forceinline__ u64 halves_product(u64 word) {
    return (word & 0xffffffff) * (word >> 32);
}

__device__ __forceinline__ u64 shuffled(u64 word, u32 distance) {
    u32 low = __shfl_xor_sync(ALL_LANES, (u32)word, distance);
    u32 high = __shfl_xor_sync(ALL_LANES, (u32)(word >> 32), distance);
    return (u64)high << 32 | low;
}

// `words` in little endian, as the bytes lie in memory.
__device__ __forceinline__ ulonglong2 shifted_up(ulonglong2 words, u32 bytes) {
    u32 bits = bytes % 8 * 8;
    ulonglong2 moved = {bytes < 8 ? words.x : 0, bytes < 8 ? words.y : words.x};
    if (bits) {
        moved.y = moved.y << bits | moved.x >> (64 - bits);
        if (bytes >= 8)
            moved.y = words.x << bits;
        moved.x <<= bits;
    }
    return moved;
}

__device__ __forceinline__ ulonglong2 shifted_down(ulonglong2 words, u32 bytes) {
    u32 bits = bytes % 8 * 8;
    ulonglong2 moved = {bytes < 8 ? words.x : words.y, bytes < 8 ? words.y : 0};
    if (bits) {
        moved.x = moved.x >> bits | moved.y << (64 - bits);
        moved.y >>= bits;
    }
    return moved;
}

__device__ __forceinline__ ulonglong2 loaded_words(u64 address) {
    return __ldcv((const ulonglong2*)address);
}

// Up to 16 bytes from any address on; those behind `len_bytes` are zero.
__device__ __forceinline__ ulonglong2 loaded(u64 address, u32 len_bytes) {
    u32 skew = (u32)address % UNIT_BYTES;
    ulonglong2 words = loaded_words(address - skew);
    if (skew) {
        words = shifted_down(words, skew);
        if (skew + len_bytes > UNIT_BYTES) {
            ulonglong2 next = shifted_up(loaded_words(address - skew + UNIT_BYTES), UNIT_BYTES - skew);
            words.x |= next.x;
            words.y |= next.y;
        }
    }
    if (len_bytes < 8) {
        words.x &= ((u64)1 << len_bytes * 8) - 1;
        words.y = 0;
    } else if (len_bytes < UNIT_BYTES) {
        words.y &= ((u64)1 << (len_bytes - 8) * 8) - 1;
    }
    return words;
}

// The first `len_bytes` of 16 to any address.
__device__ __forceinline__ void store(u64 address, ulonglong2 words, u32 len_bytes) {
    if (len_bytes == UNIT_BYTES && address % UNIT_BYTES == 0) {
        __stwt((ulonglong2*)address, words);
        return;
    }
    while (len_bytes) {
        u32 width;
        if (len_bytes >= 8 && address % 8 == 0) {
            __stwt((u64*)address, words.x);
            width = 8;
        } else if (len_bytes >= 4 && address % 4 == 0) {
            __stwt((u32*)address, (u32)words.x);
            width = 4;
        } else if (len_bytes >= 2 && address % 2 == 0) {
            __stwt((unsigned short*)address, (unsigned short)words.x);
            width = 2;
        } else {
            __stwt((unsigned char*)address, (unsigned char)words.x);
            width = 1;
        }
        words = shifted_down(words, width);
        address += width;
        len_bytes -= width;
    }
}

__device__ __forceinline__ Piece piece_at(const Tables& tables, u32 index) {
    const ulonglong2* entry = (const ulonglong2*)(tables.pieces + (u64)index * sizeof(Piece));
    ulonglong2 first = __ldcg(entry), second = __ldcg(entry + 1);
    return Piece{first.x, first.y, second.x, second.y};
}

__device__ __forceinline__ Chunk chunk_at(const Tables& tables, u32 index) {
    u64 entry = __ldcg((const u64*)(tables.chunks + (u64)index * sizeof(Chunk)));
    return Chunk{(u32)entry, (u32)(entry >> 32)};
}

// The piece with the byte `at` of the stream, among those from `first` to `last`; of those before it the nearest where none has it.
__device__ __forceinline__ u32 piece_of(const Tables& tables, u32 first, u32 last, u64 at) {
    while (first < last) {
        u32 middle = first + (last - first + 1) / 2;
        if (__ldcg((const u64*)(tables.pieces + (u64)middle * sizeof(Piece))) <= at)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

// A unit of the stream, and where it is moved if it is of one piece.
struct Unit {
    u64 at, destination, source;
    u32 index, len_bytes; // 0 = none
};

__device__ __forceinline__ Unit unit_at(const Tables& tables, u32 first, u32 last, u64 at) {
    u32 index = piece_of(tables, first, last, at);
    Piece piece = piece_at(tables, index);
    u64 into = at - piece.at;
    if (into >= piece.len_bytes)
        return Unit{at, 0, 0, index, 0};
    u64 left = piece.len_bytes - into;
    return Unit{at, piece.destination + into, piece.source + into, index, left < UNIT_BYTES ? (u32)left : UNIT_BYTES};
}

// What of a unit lies in further pieces, behind the first of them.
__device__ __forceinline__ ulonglong2 moved_rest(const Tables& tables, const Unit& unit, u32 last) {
    ulonglong2 words = {0, 0};
    u32 done = unit.len_bytes;
    for (u32 index = unit.index + 1; done && done < UNIT_BYTES && index <= last; index++) {
        Piece piece = piece_at(tables, index);
        // The next list, which has a chunk of its own.
        if (piece.at != unit.at + done)
            break;
        u32 taken = piece.len_bytes < UNIT_BYTES - done ? (u32)piece.len_bytes : UNIT_BYTES - done;
        ulonglong2 part = loaded(piece.source, taken);
        store(piece.destination, part, taken);
        part = shifted_up(part, done);
        words.x |= part.x;
        words.y |= part.y;
        done += taken;
    }
    return words;
}

// A lane's two units of a chunk.
struct Both {
    ulonglong2 near, far;
};

__device__ __forceinline__ Both moved_chunk(const Tables& tables, u32 index, u32 lane) {
    u32 first = chunk_at(tables, index).piece, last = chunk_at(tables, index + 1).piece;
    u64 at = (u64)index * CHUNK_BYTES + lane * UNIT_BYTES;
    Unit near = unit_at(tables, first, last, at), far = unit_at(tables, first, last, at + CHUNK_BYTES / 2);
    Both both = {{0, 0}, {0, 0}};
    // Both loads before the first store, which would wait for its own.
    if (near.len_bytes)
        both.near = loaded(near.source, near.len_bytes);
    if (far.len_bytes)
        both.far = loaded(far.source, far.len_bytes);
    store(near.destination, both.near, near.len_bytes);
    store(far.destination, both.far, far.len_bytes);
    ulonglong2 rest = moved_rest(tables, near, last);
    both.near.x |= rest.x;
    both.near.y |= rest.y;
    rest = moved_rest(tables, far, last);
    both.far.x |= rest.x;
    both.far.y |= rest.y;
    return both;
}

// A lane's part of what a unit adds to two neighbours of the eight sums of its list, which the secret's `keys` belong to.
__device__ __forceinline__ void add_unit(ulonglong2* sums, ulonglong2 words, ulonglong2 keys) {
    sums->x += words.y + halves_product(words.x ^ keys.x);
    sums->y += words.x + halves_product(words.y ^ keys.y);
}

// Keeps what of a unit lies in the last 64 bytes of its list.
__device__ __forceinline__ void keep_tail(u64 tail, u64 list_bytes, u64 into, ulonglong2 words) {
    u64 start = list_bytes - STRIPE_BYTES;
    if (into >= list_bytes || into + UNIT_BYTES <= start)
        return;
    u32 skip = into < start ? (u32)(start - into) : 0;
    u64 left = list_bytes - into - skip;
    u32 len_bytes = left < UNIT_BYTES - skip ? (u32)left : UNIT_BYTES - skip;
    store(tail + (into + skip - start), shifted_down(words, skip), len_bytes);
}

// The checksum of a list from the sums of its chunks, which come in their order; the same in all lanes.
__device__ __forceinline__ u64 folded(const Tables& tables, u32 index, const List& list, u32 lane) {
    u32 own = lane % 8;
    u64 sum = START[own], key = SECRET[16 + own], sums = tables.sums + ((u64)list.first_chunk * 8 + own) * 8;
    for (u32 chunk = 0; chunk + 1 < list.chunks; chunk++) {
        sum += __ldcg((const u64*)(sums + (u64)chunk * STRIPE_BYTES));
        sum = (sum ^ sum >> 47 ^ key) * 0x9e3779b1;
    }
    sum += __ldcg((const u64*)(sums + (u64)(list.chunks - 1) * STRIPE_BYTES));
    u64 last = __ldcg((const u64*)(tables.tails + ((u64)index * 8 + own) * 8));
    sum += halves_product(last ^ secret_at(121 + 8 * own)) + shuffled(last, 1);
    u64 mixed = sum ^ secret_at(11 + 8 * own), other = shuffled(mixed, 1);
    u64 all = mixed * other ^ __umul64hi(mixed, other);
    all += shuffled(all, 2);
    all += shuffled(all, 4);
    all += list.len_bytes * START[1];
    all = (all ^ all >> 37) * 0x165667919e3779f9;
    return all ^ all >> 32;
}

__device__ __forceinline__ List list_at(const Tables& tables, u32 index) {
    const ulonglong2* entry = (const ulonglong2*)(tables.lists + (u64)index * sizeof(List));
    ulonglong2 first = __ldcg(entry), second = __ldcg(entry + 1);
    return List{first.x, (u32)first.y, (u32)(first.y >> 32), second.x, (u32)second.y, 0};
}

// Leaves the sums of a chunk, and counts it.
__device__ __forceinline__ void sum_chunk(const Tables& tables, u32 index, const Both& both, ulonglong2 near, ulonglong2 far, u32 lane) {
    u32 list_index = chunk_at(tables, index).list;
    List list = list_at(tables, list_index);
    u64 start = (u64)(index - list.first_chunk) * CHUNK_BYTES, left = list.len_bytes - start;
    // The last stripe of a list is summed by itself, whole or not.
    u32 stripes = left > CHUNK_BYTES ? CHUNK_BYTES / STRIPE_BYTES : (u32)(left - 1) / STRIPE_BYTES;
    ulonglong2 sums = {0, 0};
    if (lane / 4 < stripes)
        add_unit(&sums, both.near, near);
    if (lane / 4 + 8 < stripes)
        add_unit(&sums, both.far, far);
    for (u32 distance = 4; distance < WARP_LANES; distance *= 2) {
        sums.x += shuffled(sums.x, distance);
        sums.y += shuffled(sums.y, distance);
    }
    if (lane < 4)
        __stcg((ulonglong2*)(tables.sums + (u64)index * STRIPE_BYTES + lane * UNIT_BYTES), sums);
    u64 tail = tables.tails + (u64)list_index * STRIPE_BYTES, into = start + lane * UNIT_BYTES;
    keep_tail(tail, list.len_bytes, into, both.near);
    keep_tail(tail, list.len_bytes, into + CHUNK_BYTES / 2, both.far);
    if (lane == 0)
        atomicAdd((u32*)(tables.lists + (u64)list_index * sizeof(List) + 24), 1);
}

extern "C" __global__ void __launch_bounds__(256) cxl_move(Tables tables) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % WARP_LANES;
    for (u32 index = thread / WARP_LANES; index < tables.chunk_count; index += gridDim.x * blockDim.x / WARP_LANES)
        moved_chunk(tables, index, lane);
    __threadfence_system();
}

extern "C" __global__ void __launch_bounds__(256) cxl_move_sum(Tables tables) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % WARP_LANES;
    // The secret's words of a unit: from its stripe on, those of its two sums.
    u32 word = lane / 4 + lane % 4 * 2;
    ulonglong2 near = {SECRET[word], SECRET[word + 1]}, far = {SECRET[word + 8], SECRET[word + 9]};
    for (u32 index = thread / WARP_LANES; index < tables.chunk_count; index += gridDim.x * blockDim.x / WARP_LANES) {
        Both both = moved_chunk(tables, index, lane);
        sum_chunk(tables, index, both, near, far, lane);
    }
    __threadfence_system();
}

// A warp for each list, so that all of them are folded side by side. A list that was not moved whole gets no mark.
extern "C" __global__ void __launch_bounds__(256) cxl_fold(Tables tables) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % WARP_LANES;
    for (u32 index = thread / WARP_LANES; index < tables.list_count; index += gridDim.x * blockDim.x / WARP_LANES) {
        List list = list_at(tables, index);
        if (list.done != list.chunks)
            continue;
        u64 checksum = folded(tables, index, list, lane);
        if (lane == 0)
            __stwt((ulonglong2*)(tables.results + (u64)index * UNIT_BYTES), ulonglong2{checksum, list.mark});
    }
    __threadfence_system();
}
