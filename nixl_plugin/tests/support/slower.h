// SPDX-License-Identifier: Apache-2.0
//
// How much longer than otherwise tests wait for what has to happen, where a sanitizer makes everything slower.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int SLOWER = 5;
#else
constexpr int SLOWER = 1;
#endif
