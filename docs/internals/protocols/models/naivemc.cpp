// SPDX-License-Identifier: Apache-2.0
// TraCT 3.3 as written: one slot word per host in the global_lock entry, written by the host (W, I) AND by the manager (L). No epochs.
// mode 0: one manager, no failures. mode 1: host may give up waiting (deadline). mode 2: manager fails over on a timeout. mode 3: holder timed out.
#include "mc.h"
struct S{u8 slot[3]; u8 cl[3]; struct{u8 pc,i,cand,free;}m[2]; u8 fo,cancels,tmo,bad;};
int mode; enum{I,W,Lk};
template<class E> void gen(const S&s,E emit){
 for(int h=1;h<3;h++){ S n=s; switch(s.cl[h]){ case 0: n.slot[h]=W;n.cl[h]=1;emit(n,h);break;
  case 1: if(s.slot[h]==Lk){n.cl[h]=2;emit(n,10+h);} else if(s.cancels){n.cancels--;n.slot[h]=I;n.cl[h]=0;emit(n,20+h);} break;
  case 2: n.slot[h]=I;n.cl[h]=0;emit(n,30+h);break; } }
 for(int k=0;k<2;k++){ auto&m=s.m[k]; S n=s; auto&y=n.m[k];
  if(m.pc==9) { if(s.fo){n.fo--; y.pc=1;y.i=1;y.cand=0;y.free=1; emit(n,40+k);} continue; }
  switch(m.pc){ case 1: // scan slots: any L -> not free; remember first W
    if(s.slot[m.i]==Lk){ if(s.tmo){ S t=s; t.tmo--; t.slot[m.i]=I; emit(t,60+m.i);} y.free=0;} else if(s.slot[m.i]==W&&!m.cand) y.cand=m.i; y.i++;
    if(y.i==3){ y.i=1; if(y.free&&y.cand) y.pc=2; else {y.cand=0;y.free=1;} } emit(n,50+k); break;
   case 2: n.slot[m.cand]=Lk; y.pc=1;y.i=1;y.cand=0;y.free=1; emit(n,70+k); break; } } }
int main(int c,char**v){ mode=atoi(v[1]); S s; memset(&s,0,sizeof s); s.m[0].pc=1;s.m[0].i=1;s.m[0].free=1; s.m[1].pc=9; if(mode==2)s.fo=1; if(mode==1)s.cancels=2; if(mode==3)s.tmo=1;
 Explorer<S> X; int stuck=0; auto bad=[&](const S&t){return (t.cl[1]==2&&t.cl[2]==2)?1:0;};
 int b=X.run(s,[&](const S&t,auto e){gen(t,e);},bad,5000000); 
 // L word without an owner (host idle, slot L): the lock is lost for ever
 if(!b) for(size_t i=0;i<X.st.size();i++){ auto&t=X.st[i]; for(int h=1;h<3;h++) if(t.slot[h]==Lk&&t.cl[h]==0) stuck=1; }
 printf("naive mode %d: %s states=%zu%s steps=%zu :",mode,b?"TWO HOLDERS":"no double holder",X.st.size(),stuck?" + LOST LOCK (slot says L, no host holds)":"",b?X.trace(X.badAt).size():0); if(b) for(int l:X.trace(X.badAt)) printf(" %d",l); puts(""); }
