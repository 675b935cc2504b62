// SPDX-License-Identifier: Apache-2.0
// Tiny explicit-state explorer. A state is a POD; every move is ONE line publish or ONE line fetch (+ local computing).
// Pauses need no extra machinery: a process that is not scheduled is paused. Crashes are moves.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>
#include <string>
#include <functional>
#include <chrono>
typedef uint8_t u8;
template<class S> struct Explorer {
  std::vector<S> st; std::vector<uint32_t> par; std::vector<uint16_t> lab; std::vector<uint32_t> tab; size_t mask=0;
  static uint64_t h(const S&s){ const u8*p=(const u8*)&s; uint64_t x=0x9E3779B97F4A7C15ull; size_t n=sizeof(S); size_t i=0;
    for(;i+8<=n;i+=8){uint64_t v; memcpy(&v,p+i,8); x^=v; x*=0xff51afd7ed558ccdull; x^=x>>32;}
    for(;i<n;i++){x^=p[i]; x*=0xc4ceb9fe1a85ec53ull; x^=x>>29;} return x;}
  void grow(){ size_t n=mask?2*(mask+1):1<<16; tab.assign(n,0); mask=n-1; for(uint32_t i=0;i<st.size();i++) put(i);}
  void put(uint32_t i){ size_t q=h(st[i])&mask; while(tab[q])q=(q+1)&mask; tab[q]=i+1;}
  bool add(const S&s,uint32_t p,uint16_t l){ if(st.size()*2>=mask)grow(); size_t q=h(s)&mask;
    while(tab[q]){ if(!memcmp(&st[tab[q]-1],&s,sizeof(S)))return false; q=(q+1)&mask;}
    st.push_back(s);par.push_back(p);lab.push_back(l);tab[q]=st.size();return true;}
  size_t edges=0; uint32_t badAt=0; bool capped=false; int depth=0;
  // gen(s, emit(S,label)); bad(s)->code
  template<class G,class B> int run(const S&init,G gen,B bad,size_t cap){
    grow(); add(init,0,0); 
    for(uint32_t i=0;i<st.size();i++){
      if(st.size()>cap){capped=true;return 0;}
      S cur=st[i]; int code=0;
      gen(cur,[&](const S&n,int l){ if(code) return; edges++; if(add(n,i,l)){ int c=bad(n); if(c){code=c;badAt=st.size()-1;} } });
      if(code) return code;
    } return 0; }
  std::vector<int> trace(uint32_t i){ std::vector<int> v; while(i){v.push_back(lab[i]);i=par[i];} return std::vector<int>(v.rbegin(),v.rend()); }
};
